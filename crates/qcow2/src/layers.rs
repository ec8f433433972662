//! The layers of a chain at one moment, from the base.
//!
//! A layer has a number, which names it in memory, and a position, which names it in the sidecars.
//! A layer keeps its number for as long as it is open; its position changes when a layer beneath it
//! is added or removed. Layers that were opened together are numbered from the base.
//!
//! Invariants
//! - I1 No two layers share a number.
//! - I2 There is at least one layer.

use crate::layer::Layer;
use mica_block::Store;
use mica_units::LayerNumber;
use std::sync::Arc;

/// The layers of a chain.
pub(crate) struct Layers {
    /// From the base.
    order: Vec<Arc<Layer>>,
    /// Where each of them has its data, side by side: a read of one of thousands finds little else
    /// of its layer in the processor's cache.
    data: Vec<Arc<dyn Store>>,
    /// Positions by number.
    positions: Vec<Option<u16>>,
    /// Whether each number is also the layer's position.
    are_positions_numbers: bool,
}

impl Layers {
    /// The layers in `order`, from the base.
    ///
    /// # Panics
    /// If there is none, if two share a number, or if there are more than
    /// [`LayerNumber::COUNT_MAX`].
    pub(crate) fn new(order: Vec<Arc<Layer>>) -> Self {
        let count = order.iter().map(|layer| layer.number.index() + 1).max();
        let mut positions = vec![None; count.expect("a chain has a layer")];
        for (position, layer) in order.iter().enumerate() {
            let position = u16::try_from(position).expect("bounded by the chain's length");
            let before = positions[layer.number.index()].replace(position);
            assert!(before.is_none(), "a number is one layer's");
        }
        let are_positions_numbers =
            order.iter().enumerate().all(|(position, layer)| layer.number.index() == position);
        let data = order.iter().map(|layer| Arc::clone(&layer.data)).collect();
        Self { order, data, positions, are_positions_numbers }
    }

    /// All of them, from the base.
    pub(crate) fn all(&self) -> &[Arc<Layer>] {
        &self.order
    }

    /// All but the uppermost.
    pub(crate) fn frozen(&self) -> &[Arc<Layer>] {
        &self.order[..self.order.len() - 1]
    }

    /// The lowest one.
    pub(crate) fn base(&self) -> &Arc<Layer> {
        &self.order[0]
    }

    /// The uppermost one.
    pub(crate) fn active(&self) -> &Arc<Layer> {
        &self.order[self.order.len() - 1]
    }

    /// The layer with this number.
    ///
    /// # Panics
    /// If there is none: a caller with a number from a plan holds the layer's chain.
    #[inline]
    pub(crate) fn get(&self, number: LayerNumber) -> &Arc<Layer> {
        &self.order[self.place(number)]
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
        if self.are_positions_numbers { number.index() } else { self.position(number) }
    }

    /// How many layers are beneath the one with this number.
    ///
    /// # Panics
    /// As [`Self::get`].
    #[inline]
    pub(crate) fn position(&self, number: LayerNumber) -> usize {
        let position = self.positions.get(number.index()).copied().flatten();
        usize::from(position.expect("a layer of the chain"))
    }

    /// The number of the layer at `position`, if there is one.
    pub(crate) fn number_at(&self, position: usize) -> Option<LayerNumber> {
        self.order.get(position).map(|layer| layer.number)
    }

    /// Whether each layer's number is its position, as in a chain in which nothing has changed.
    pub(crate) fn are_positions_numbers(&self) -> bool {
        self.are_positions_numbers
    }

    /// A number that no layer has; `None` if the chain has as many layers as it may have.
    pub(crate) fn free_number(&self) -> Option<LayerNumber> {
        let gap = self.positions.iter().position(Option::is_none);
        LayerNumber::new(gap.unwrap_or(self.positions.len()))
    }

    /// These layers with `frozen` in place of the uppermost one, whose number it has, and `active`
    /// on top.
    pub(crate) fn pushed(&self, frozen: Arc<Layer>, active: Arc<Layer>) -> Self {
        let mut order = self.frozen().to_vec();
        assert_eq!(frozen.number, self.active().number, "it is the same layer");
        order.extend([frozen, active]);
        Self::new(order)
    }
}
