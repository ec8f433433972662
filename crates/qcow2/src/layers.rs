//! The layers of a chain at one moment, from the base.
//!
//! A layer has a number, which names it in memory, and a position, which names it in the sidecars.
//! A layer keeps its number for as long as it is open; its position changes when a layer beneath it
//! is added or removed. Layers that were opened together are numbered from the base.
//!
//! A layer that has left the chain is still found by its number while a plan may name it: it is
//! *retired*. It has no position of its own, only that of the layer that has its data now.
//!
//! Invariants
//! - I1 No two layers share a number, retired ones included.
//! - I2 There is at least one layer that is not retired.

use crate::layer::Layer;
use mica_block::Store;
use mica_units::LayerNumber;
use std::sync::Arc;

/// The layers of a chain.
pub(crate) struct Layers {
    /// From the base, and then those that are retired.
    known: Vec<Arc<Layer>>,
    /// How many of them are not retired.
    count: usize,
    /// The position that is told for each of the others.
    heirs: Vec<u16>,
    /// Where each of them has its data, side by side: a read of one of thousands finds little else
    /// of its layer in the processor's cache.
    data: Vec<Arc<dyn Store>>,
    /// Places in `known` by number.
    places: Vec<Option<u16>>,
    /// Whether each number is also the layer's place.
    are_places_numbers: bool,
}

impl Layers {
    /// The layers in `order`, from the base.
    ///
    /// # Panics
    /// If there is none, if two share a number, or if there are more than
    /// [`LayerNumber::COUNT_MAX`].
    pub(crate) fn new(order: Vec<Arc<Layer>>) -> Self {
        Self::with_retired(order, Vec::new())
    }

    /// The same, with `retired` ones, and the position of each one's heir.
    fn with_retired(order: Vec<Arc<Layer>>, retired: Vec<(Arc<Layer>, u16)>) -> Self {
        let count = order.len();
        let mut known = order;
        assert!(count > 0, "I2: a chain has a layer");
        let (gone, heirs): (Vec<_>, Vec<_>) = retired.into_iter().unzip();
        known.extend(gone);
        let numbers = known.iter().map(|layer| layer.number.index() + 1).max();
        let mut places = vec![None; numbers.expect("a chain has a layer")];
        for (place, layer) in known.iter().enumerate() {
            let place = u16::try_from(place).expect("bounded by the chain's length");
            let before = places[layer.number.index()].replace(place);
            assert!(before.is_none(), "I1: a number is one layer's");
        }
        let are_places_numbers =
            known.iter().enumerate().all(|(place, layer)| layer.number.index() == place);
        let data = known.iter().map(|layer| Arc::clone(&layer.data)).collect();
        Self { known, count, heirs, data, places, are_places_numbers }
    }

    /// All of them, from the base.
    pub(crate) fn all(&self) -> &[Arc<Layer>] {
        &self.known[..self.count]
    }

    /// All but the uppermost.
    pub(crate) fn frozen(&self) -> &[Arc<Layer>] {
        &self.known[..self.count - 1]
    }

    /// The lowest one.
    pub(crate) fn base(&self) -> &Arc<Layer> {
        &self.known[0]
    }

    /// The uppermost one.
    pub(crate) fn active(&self) -> &Arc<Layer> {
        &self.known[self.count - 1]
    }

    /// The layer with this number.
    ///
    /// # Panics
    /// If there is none: a caller with a number from a plan holds the layer's chain.
    #[inline]
    pub(crate) fn get(&self, number: LayerNumber) -> &Arc<Layer> {
        &self.known[self.place(number)]
    }

    /// Where the layer with this number has its data.
    ///
    /// # Panics
    /// As [`Self::get`].
    #[inline]
    pub(crate) fn data_of(&self, number: LayerNumber) -> &dyn Store {
        &*self.data[self.place(number)]
    }

    #[inline]
    fn place(&self, number: LayerNumber) -> usize {
        match self.are_places_numbers {
            true => number.index(),
            false => {
                let place = self.places.get(number.index()).copied().flatten();
                usize::from(place.expect("a layer of the chain"))
            }
        }
    }

    /// How many layers are beneath the one with this number, or, if that is retired, beneath the
    /// one that has its data.
    ///
    /// # Panics
    /// As [`Self::get`].
    #[inline]
    pub(crate) fn position(&self, number: LayerNumber) -> usize {
        match self.place(number) {
            place if place < self.count => place,
            place => usize::from(self.heirs[place - self.count]),
        }
    }

    /// As [`Self::position`], but `None` if there is no such layer.
    pub(crate) fn known_position(&self, number: LayerNumber) -> Option<usize> {
        self.places.get(number.index()).copied().flatten().map(|_| self.position(number))
    }

    /// The number of the layer at `position`, if there is one.
    pub(crate) fn number_at(&self, position: usize) -> Option<LayerNumber> {
        self.all().get(position).map(|layer| layer.number)
    }

    /// Whether each layer's number is its position, as in a chain in which nothing has changed.
    pub(crate) fn are_positions_numbers(&self) -> bool {
        self.are_places_numbers
    }

    /// A number that no layer has; `None` if the chain has as many layers as it may have.
    pub(crate) fn free_number(&self) -> Option<LayerNumber> {
        let gap = self.places.iter().position(Option::is_none);
        LayerNumber::new(gap.unwrap_or(self.places.len()))
    }

    /// These layers with `frozen` in place of the uppermost one, whose number it has, and `active`
    /// on top.
    pub(crate) fn pushed(&self, frozen: Arc<Layer>, active: Arc<Layer>) -> Self {
        let mut order = self.frozen().to_vec();
        assert_eq!(frozen.number, self.active().number, "it is the same layer");
        order.extend([frozen, active]);
        Self::new(order)
    }

    /// These layers with `layer` in place of the one whose number it has.
    pub(crate) fn replaced(&self, layer: Arc<Layer>) -> Self {
        let mut order = self.all().to_vec();
        let position = self.position(layer.number);
        order[position] = layer;
        Self::new(order)
    }

    /// These layers without those at the positions `from..to`, which are retired: their heir is the
    /// one at position `heir` of the new chain.
    pub(crate) fn without(&self, from: usize, to: usize, heir: usize) -> Self {
        assert!(self.heirs.is_empty(), "one merge at a time");
        let heir = u16::try_from(heir).expect("bounded by the chain's length");
        let mut order = self.all().to_vec();
        let retired = order.drain(from..to).map(|layer| (layer, heir)).collect();
        Self::with_retired(order, retired)
    }

    /// These layers without those that are retired: nothing names them any more.
    pub(crate) fn without_retired(&self) -> Self {
        Self::new(self.all().to_vec())
    }
}
