//! Two chains from their tops down, one layer of each in turn, until they meet.

use super::{DiffFormat, DiffState};
use crate::layer::Layer;
use crate::open::{ImageFormat, OpenAs, Opened, build_layer, loop_error, open_one};
use crate::redo::read_over;
use crate::snapshots::SnapshotSelector;
use mica_block::{Error, ErrorKind, Images, Result};
use mica_units::LayerNumber;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Two chains, as far as they had to be opened.
pub(super) struct Descended {
    pub(super) tops: [Arc<Layer>; 2],
    /// The layers that only one of them has, from the top.
    pub(super) own: [Vec<Arc<Layer>>; 2],
    /// The layer at which they meet.
    pub(super) common: Option<Arc<Layer>>,
}

/// A state of a file, an internal snapshot of it or its present, as it is read in this format.
type Key = (u64, u64, Option<SnapshotSelector>, ImageFormat);

/// One of the chains.
struct Way<'a> {
    state: DiffState<'a>,
    next: Option<(PathBuf, ImageFormat)>,
    opened: Vec<Opened>,
    seen: HashMap<Key, usize>,
    /// Why it goes no further: it may meet the other one above.
    failure: Option<Error>,
}

pub(super) async fn descend(states: [DiffState<'_>; 2]) -> Result<Descended> {
    let mut ways = states.map(Way::new);
    let met = loop {
        let mut is_done = true;
        let mut met = None;
        for side in [0, 1] {
            let Some(key) = ways[side].step().await? else { continue };
            is_done = false;
            if let Some(at) = ways[1 - side].seen.get(&key) {
                let mut places = [ways[0].opened.len() - 1, ways[1].opened.len() - 1];
                places[1 - side] = *at;
                met = Some(places);
                break;
            }
        }
        if met.is_some() || is_done {
            break met;
        }
    };
    if met.is_none()
        && let Some(failure) = ways.iter_mut().find_map(|way| way.failure.take())
    {
        return Err(failure);
    }
    let [first, second] = ways;
    let [one, other] = [first.state, second.state];
    let ends = met.unwrap_or([first.opened.len(), second.opened.len()]);
    let (mut first, beyond) = first.layers(ends[0]).await?;
    let (mut second, _) = second.layers(ends[1]).await?;
    let common = match beyond {
        Some(opened) if met.is_some() => {
            let snapshot = if ends[0] == 0 { one.snapshot } else { None };
            Some(layer(one.images, opened, (0, snapshot)).await?)
        }
        _ => None,
    };
    let top = |own: &mut Vec<Arc<Layer>>| own.first().or(common.as_ref()).map(Arc::clone);
    let tops = [top(&mut first), top(&mut second)];
    let [Some(first_top), Some(second_top)] = tops else {
        let context = format!("{} has no layer", other.path.display());
        return Err(Error::new(ErrorKind::Invalid, context));
    };
    Ok(Descended { tops: [first_top, second_top], own: [first, second], common })
}

impl<'a> Way<'a> {
    fn new(state: DiffState<'a>) -> Self {
        let format = match state.format {
            DiffFormat::Qcow2 => ImageFormat::Qcow2,
            DiffFormat::Raw => ImageFormat::Raw,
            DiffFormat::Luks => ImageFormat::Luks,
        };
        let next = Some((state.path.to_owned(), format));
        Self { state, next, opened: Vec::new(), seen: HashMap::new(), failure: None }
    }

    /// Opens the next layer; `None` at the end.
    async fn step(&mut self) -> Result<Option<Key>> {
        let Some((path, format)) = self.next.take() else { return Ok(None) };
        let name = path.display().to_string();
        let opened = async {
            let image = self.state.images.open(&path)?;
            let image = read_over(self.state.images, &path, image).await?;
            open_one(self.state.images, image, path, format).await
        };
        let (opened, below) = match opened.await {
            Ok(opened) => opened,
            Err(error) => {
                let error = error.wrap(name);
                if self.opened.is_empty() {
                    return Err(error);
                }
                self.failure = Some(error);
                return Ok(None);
            }
        };
        let snapshot = self.state.snapshot.filter(|_| self.opened.is_empty()).cloned();
        let identity = opened.image.identity;
        let key = (identity.device, identity.inode, snapshot, opened.format());
        if self.seen.insert(key.clone(), self.opened.len()).is_some() {
            return Err(loop_error(&opened.path));
        }
        if self.opened.len() == LayerNumber::COUNT_MAX {
            let context = format!("the chain has more than {} layers", LayerNumber::COUNT_MAX);
            return Err(Error::new(ErrorKind::Limit, context));
        }
        self.opened.push(opened);
        self.next = below;
        Ok(Some(key))
    }

    /// Opens the layers down to, not including, the one at `end`; returns them, and that one if it
    /// was opened.
    async fn layers(mut self, end: usize) -> Result<(Vec<Arc<Layer>>, Option<Opened>)> {
        let common = self.opened.drain(end..).next();
        let mut layers = Vec::with_capacity(end);
        for (number, opened) in self.opened.into_iter().enumerate() {
            let snapshot = self.state.snapshot.filter(|_| number == 0);
            layers.push(layer(self.state.images, opened, (number, snapshot)).await?);
        }
        Ok((layers, common))
    }
}

async fn layer(
    images: &dyn Images,
    opened: Opened,
    (number, snapshot): (usize, Option<&SnapshotSelector>),
) -> Result<Arc<Layer>> {
    let name = opened.path.display().to_string();
    let number = LayerNumber::new(number).expect("bounded while it was opened");
    let built = build_layer(images, opened, number, OpenAs { snapshot, writable: false }).await;
    built.map(|(layer, _)| Arc::new(layer)).map_err(|error| error.wrap(name))
}
