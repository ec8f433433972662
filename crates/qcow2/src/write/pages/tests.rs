//! The pages against a plain copy of all metadata, from a seed: changes, loads that take their
//! time, groups that are written piece by piece, and some that fail halfway.

use super::super::clusters::Beneath;
use super::super::overlay::MetadataStore;
use super::*;
use crate::testing::{at_once, done_at_once, from_seeds};
use mica_store::MemoryStore;
use mica_units::Rng;
use std::collections::BTreeMap;

/// Pages of the file.
const PAGES: u64 = 48;
/// Clean pages that are kept: few, so that pages come and go.
const KEPT: usize = 6;
const STEPS: u64 = 2500;

type Bytes = Vec<u8>;

/// What there must be of the metadata.
struct Model {
    page_bytes: usize,
    /// What a reader sees, by page.
    now: Vec<Bytes>,
    /// What the file holds.
    file: Vec<Bytes>,
    early: BTreeSet<u64>,
    late: BTreeSet<u64>,
    /// Pages of clusters that nothing names: nobody asks what they hold.
    unnamed: BTreeSet<u64>,
    number: u64,
    durable: u64,
    in_two_steps: bool,
    new_tables: BTreeSet<HostOffset>,
    freed: Vec<HostCluster>,
    zeroed: BTreeSet<HostCluster>,
    group: Option<TakenGroup>,
}

/// A group that is being written.
struct TakenGroup {
    dirty: Dirty,
    group: Group,
    /// What its pages held when it was taken.
    copies: BTreeMap<u64, Bytes>,
    /// What is still to be written.
    early: Vec<(HostOffset, Buf)>,
    late: Vec<(HostOffset, Buf)>,
    zeroed: BTreeSet<HostCluster>,
}

impl Model {
    /// Whether nothing but memory holds what the page is to be.
    fn is_ahead_of_file(&self, page: u64) -> bool {
        self.early.contains(&page) || self.late.contains(&page)
    }

    fn is_being_written(&self, page: u64) -> bool {
        self.group.as_ref().is_some_and(|taken| taken.copies.contains_key(&page))
    }

    fn at(&self, page: u64) -> HostOffset {
        HostOffset::new(page * self.page_bytes as u64)
    }

    fn forget_dirty(&mut self, page: u64) {
        self.early.remove(&page);
        self.late.remove(&page);
    }

    /// The page is changed: early or late as its first change was.
    fn make_dirty(&mut self, page: u64, stage: Stage) {
        if !self.is_ahead_of_file(page) {
            match stage {
                Stage::Early => self.early.insert(page),
                Stage::Late => self.late.insert(page),
            };
        }
    }
}

struct Run<'a> {
    rng: Rng,
    metadata: &'a Arc<Metadata>,
    store: Arc<MemoryStore>,
    model: Model,
    cluster_pages: u64,
    /// Loads under way, each with what it read if it got that far.
    loads: Vec<(Loading<'a>, Option<Bytes>)>,
    pins: Vec<Pinned>,
}

fn random_bytes(rng: &mut Rng, len: usize) -> Bytes {
    (0..len.div_ceil(8)).flat_map(|_| rng.next_u64().to_be_bytes()).take(len).collect()
}

/// One of `0..len`.
fn index_below(rng: &mut Rng, len: usize) -> usize {
    usize::try_from(rng.below(len as u64)).expect("it was one")
}

fn index(page: u64) -> usize {
    usize::try_from(page).expect("few pages")
}

impl Run<'_> {
    /// A page that is named and no part of the header.
    fn table_page(&mut self) -> Option<u64> {
        let page = self.cluster_pages + self.rng.below(PAGES - self.cluster_pages);
        (!self.model.unnamed.contains(&page)).then_some(page)
    }

    /// A cluster other than the header's, as the pages that it has.
    fn cluster(&mut self) -> std::ops::Range<u64> {
        let clusters = PAGES / self.cluster_pages;
        let first = (1 + self.rng.below(clusters - 1)) * self.cluster_pages;
        first..first + self.cluster_pages
    }

    fn read_file(&self, page: u64) -> Bytes {
        let buf = Buf::new(self.model.page_bytes);
        let (read, buf) = at_once(self.store.read_at(buf, self.model.at(page)));
        read.expect("memory is read");
        buf.to_vec()
    }

    fn change(&mut self) {
        let Some(page) = self.table_page() else { return };
        let stage = if self.rng.percent(50) { Stage::Early } else { Stage::Late };
        let within = index_below(&mut self.rng, self.model.page_bytes - 8);
        let bytes = random_bytes(&mut self.rng, 8);
        let at = HostOffset::new(self.model.at(page).bytes() + within as u64);
        done_at_once(self.metadata.change(at, |pages| {
            let to = pages.get_mut(at, 8, stage).expect("the page was loaded");
            to.copy_from_slice(&bytes);
        }));
        self.model.now[index(page)][within..within + 8].copy_from_slice(&bytes);
        self.model.make_dirty(page, stage);
    }

    fn change_header(&mut self) {
        let page = self.rng.below(self.cluster_pages);
        let within = index_below(&mut self.rng, self.model.page_bytes - 8);
        let bytes = random_bytes(&mut self.rng, 8);
        let at = HostOffset::new(self.model.at(page).bytes() + within as u64);
        let logged = self.metadata.lock().logging.allow_marks();
        done_at_once(self.metadata.write_header(logged, &bytes, at));
        for content in [&mut self.model.now, &mut self.model.file] {
            content[index(page)][within..within + 8].copy_from_slice(&bytes);
        }
    }

    fn put_cluster(&mut self) {
        let pages = self.cluster();
        if pages.clone().any(|page| self.model.is_being_written(page)) {
            // What was freed is not used again before its group is done.
            return;
        }
        let at = self.model.at(pages.start);
        let len = self.model.page_bytes * index(self.cluster_pages);
        let in_file: Bytes =
            pages.clone().flat_map(|page| self.model.file[index(page)].clone()).collect();
        let (content, beneath) = match self.rng.below(4) {
            0 => (Some(in_file.clone()), Beneath::Same),
            1 => (None, Beneath::Blank),
            2 => (Some(random_bytes(&mut self.rng, len)), Beneath::Blank),
            _ => (Some(random_bytes(&mut self.rng, len)), Beneath::Old(&in_file)),
        };
        // What is put in is used.
        let touches: Vec<_> = pages.clone().map(|page| self.model.at(page).bytes()).collect();
        self.evicting(&touches, |state| {
            state.put_cluster(at, len as u64, content.as_deref(), beneath);
        });
        let content = content.unwrap_or_else(|| vec![0; len]);
        for (page, bytes) in pages.zip(content.chunks_exact(self.model.page_bytes)) {
            self.model.unnamed.remove(&page);
            self.model.forget_dirty(page);
            if beneath != Beneath::Same {
                self.model.make_dirty(page, Stage::Early);
            }
            self.model.now[index(page)] = bytes.to_vec();
        }
    }

    fn drop_cluster(&mut self) {
        let pages = self.cluster();
        let len = self.model.page_bytes as u64 * self.cluster_pages;
        self.metadata.lock().drop_cluster(self.model.at(pages.start), len);
        for page in pages {
            self.model.forget_dirty(page);
            self.model.unnamed.insert(page);
        }
    }

    fn start_loading(&mut self) {
        let at = self.model.at(self.rng.below(PAGES));
        self.loads.extend(self.metadata.start_loading(at).map(|loading| (loading, None)));
    }

    /// A load reads the file, or takes what it read into the pages.
    fn go_on_loading(&mut self) {
        if self.loads.is_empty() {
            return;
        }
        let which = index_below(&mut self.rng, self.loads.len());
        let (loading, bytes) = self.loads.swap_remove(which);
        match bytes {
            None => {
                let bytes = self.read_file(loading.page / self.model.page_bytes as u64);
                self.loads.push((loading, Some(bytes)));
            }
            // A request that is abandoned drops its load.
            Some(_) if self.rng.percent(10) => {}
            Some(bytes) => {
                let is_here = self.metadata.lock().pages.contains_key(&loading.page);
                match is_here {
                    true => self.metadata.lock().insert_loaded(loading.page, &bytes),
                    false => self.evicting(&[], |state| state.insert_loaded(loading.page, &bytes)),
                }
            }
        }
    }

    fn pin(&mut self) {
        if self.pins.len() < 4 && self.rng.percent(50) {
            let at = self.model.at(self.rng.below(PAGES - 3));
            self.pins.push(self.metadata.pin(at, self.model.page_bytes as u64 * 2 + 1));
        } else if !self.pins.is_empty() {
            let which = index_below(&mut self.rng, self.pins.len());
            self.pins.swap_remove(which);
        }
    }

    /// Reads any bytes as readers of the layer do.
    fn read_over(&mut self) {
        let store = MetadataStore::new(Arc::clone(self.metadata));
        let all = self.model.page_bytes * index(PAGES);
        let first = index_below(&mut self.rng, all - 1);
        let most = (all - first).min(3 * self.model.page_bytes);
        let len = 1 + index_below(&mut self.rng, most);
        let (read, buf) = at_once(store.read_at(Buf::new(len), HostOffset::new(first as u64)));
        read.expect("memory is read");
        for (at, byte) in (first..).zip(buf.iter()) {
            let (page, within) = (at / self.model.page_bytes, at % self.model.page_bytes);
            if !self.model.unnamed.contains(&(page as u64)) {
                assert_eq!(*byte, self.model.now[page][within], "page {page} as a reader sees it");
            }
        }
    }

    fn note_for_group(&mut self) {
        let mut state = self.metadata.lock();
        let number = self.rng.below(30);
        match self.rng.below(4) {
            0 => {
                let table = HostOffset::new(number << 12);
                state.group.new_tables.insert(table);
                self.model.new_tables.insert(table);
            }
            1 => {
                state.group.freed.push(HostCluster::new(number));
                self.model.freed.push(HostCluster::new(number));
            }
            2 => {
                state.group.in_two_steps = true;
                self.model.in_two_steps = true;
            }
            _ => {
                state.note_zeroed(HostCluster::new(number));
                self.model.zeroed.insert(HostCluster::new(number));
            }
        }
    }

    /// A flush begins. There is one at a time.
    fn take_group(&mut self) {
        let mut state = self.metadata.lock();
        let (mut dirty, group) = state.take_group(SpaceState::default());
        let model = &mut self.model;
        assert_eq!(group.number, model.number);
        assert_eq!(group.in_two_steps, model.in_two_steps);
        assert_eq!(group.new_tables, model.new_tables);
        let mut freed = group.freed.clone();
        freed.sort_unstable();
        model.freed.sort_unstable();
        assert_eq!(freed, model.freed);
        let (mut early, mut late) =
            (std::mem::take(&mut dirty.early), std::mem::take(&mut dirty.late));
        let mut copies = BTreeMap::new();
        for (writes, due) in [(&early, &model.early), (&late, &model.late)] {
            let mut pages = BTreeSet::new();
            for (at, buf) in writes {
                let first = at.bytes() / model.page_bytes as u64;
                for (page, bytes) in (first..).zip(buf.chunks_exact(model.page_bytes)) {
                    assert!(pages.insert(page), "page {page} is written once");
                    copies.insert(page, bytes.to_vec());
                    if !model.unnamed.contains(&page) {
                        assert_eq!(bytes, model.now[index(page)], "page {page} of the group");
                    }
                }
            }
            pages.retain(|page| !model.unnamed.contains(page));
            assert_eq!(&pages, due, "the pages of a stage");
        }
        self.rng.shuffle(&mut early);
        self.rng.shuffle(&mut late);
        let zeroed = std::mem::take(&mut model.zeroed);
        model.group = Some(TakenGroup { dirty, group, copies, early, late, zeroed });
        model.number += 1;
        model.in_two_steps = false;
        model.early.clear();
        model.late.clear();
        model.new_tables.clear();
        model.freed.clear();
    }

    /// One write of the group is done.
    fn write_piece(&mut self) {
        let Some(taken) = &mut self.model.group else { return };
        let Some((at, buf)) = taken.early.pop().or_else(|| taken.late.pop()) else { return };
        let first = at.bytes() / self.model.page_bytes as u64;
        for (page, bytes) in (first..).zip(buf.chunks_exact(self.model.page_bytes)) {
            self.model.file[index(page)] = bytes.to_vec();
        }
        done_at_once(write_all(&*self.store, buf, at));
    }

    /// The group is done as far as it goes: it failed if something is left of it.
    fn end_group(&mut self) {
        let Some(taken) = self.model.group.take() else { return };
        let (dirty, group) = (&taken.dirty, taken.group);
        let (number, has_failed_early) = (group.number, !taken.early.is_empty());
        if !has_failed_early && taken.late.is_empty() {
            self.evicting(&[], |state| {
                state.written(dirty);
                state.group.durable = number;
                state.forget_zeroed(number);
            });
            self.model.durable = number;
            return;
        }
        let model = &mut self.model;
        model.zeroed.extend(&taken.zeroed);
        model.freed.extend(&group.freed);
        let page_bytes = model.page_bytes as u64;
        let named = |pages: &BTreeSet<u64>| -> Vec<u64> {
            let pages = pages.iter().map(|at| at / page_bytes);
            pages.filter(|page| !model.unnamed.contains(page)).collect()
        };
        let (early, late) = (named(&dirty.early_pages), named(&dirty.late_pages));
        if has_failed_early {
            model.in_two_steps = true;
            model.new_tables.extend(&group.new_tables);
            for page in early {
                model.late.remove(&page);
                model.early.insert(page);
            }
            late.into_iter().for_each(|page| model.make_dirty(page, Stage::Late));
            self.evicting(&[], |state| state.put_back(dirty, group));
        } else {
            model.durable = number;
            late.into_iter().for_each(|page| model.make_dirty(page, Stage::Late));
            self.evicting(&[], |state| state.put_back_links(dirty, group));
        }
    }

    /// The pages that may be evicted: those that were used since the last look, or those that were
    /// not.
    fn loose(state: &PageState, is_used: bool) -> Vec<u64> {
        let is_loose = |(number, page): &(&u64, &Page)| {
            let is_busy = page.dirty.is_some() || page.writing;
            !is_busy && !state.loading.contains_key(number) && page.used.get() == is_used
        };
        state.pages.iter().filter(is_loose).map(|(number, _)| *number).collect()
    }

    /// Does what may evict pages. What was used stays; more pages than are kept are here only if
    /// all the others are gone, but for those that it `touches`.
    fn evicting(&self, touches: &[u64], act: impl FnOnce(&mut PageState)) {
        let mut state = self.metadata.lock();
        let (used, mut idle) = (Self::loose(&state, true), Self::loose(&state, false));
        idle.retain(|page| !touches.contains(page));
        act(&mut state);
        assert!(used.iter().all(|page| state.pages.contains_key(page)), "what is used stays");
        if state.pages.len() > KEPT + state.dirty_count() {
            idle.retain(|page| Self::loose(&state, false).contains(page));
            assert!(idle.is_empty(), "{} pages, idle {idle:x?}", state.pages.len());
        }
    }

    fn check(&self) {
        let state = self.metadata.lock();
        state.verify();
        let model = &self.model;
        assert_eq!((state.group.number, state.group.durable), (model.number, model.durable));
        for cluster in (0..30).map(HostCluster::new) {
            let is_zeroed = model.zeroed.contains(&cluster)
                || model.group.as_ref().is_some_and(|group| group.zeroed.contains(&cluster));
            assert_eq!(state.is_zeroed(cluster), is_zeroed, "cluster {cluster}");
        }
        for page in (0..PAGES).filter(|page| !model.unnamed.contains(page)) {
            let now = &model.now[index(page)];
            // Asked of the map, as `get` marks a page as used.
            match state.pages.get(&model.at(page).bytes()) {
                Some(held) => {
                    assert_eq!(&*held.bytes, now, "page {page} in memory");
                    assert_eq!(held.dirty == Some(Stage::Early), model.early.contains(&page));
                    assert_eq!(held.dirty == Some(Stage::Late), model.late.contains(&page));
                    assert_eq!(held.writing, model.is_being_written(page), "page {page}");
                }
                None => assert_eq!(&model.file[index(page)], now, "page {page} is gone"),
            }
            // Nothing is lost that no group will write.
            if !model.is_ahead_of_file(page) {
                let copy = model.group.as_ref().and_then(|taken| taken.copies.get(&page));
                assert_eq!(copy.unwrap_or(&model.file[index(page)]), now, "page {page}");
            }
        }
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0..30 => self.change(),
            30..33 => self.change_header(),
            33..40 => self.put_cluster(),
            40..43 => self.drop_cluster(),
            43..52 => self.start_loading(),
            52..66 => self.go_on_loading(),
            66..70 => self.pin(),
            70..76 => self.read_over(),
            76..82 => self.note_for_group(),
            82..86 if self.model.group.is_none() => self.take_group(),
            82..97 => self.write_piece(),
            _ => self.end_group(),
        }
    }
}

#[test]
fn pages_hold_what_a_plain_copy_holds_and_lose_nothing() {
    from_seeds(6, |seed| {
        let mut rng = Rng::new(seed);
        // Pages as large as a cluster, and two in one.
        let bits = ClusterBits::new(if seed % 3 == 2 { 13 } else { 9 }).expect("of the format");
        let page_bytes = 1_usize << bits.bits().min(PAGE_BITS_MAX);
        let file = random_bytes(&mut rng, page_bytes * index(PAGES));
        let pages: Vec<_> = file.chunks_exact(page_bytes).map(<[u8]>::to_vec).collect();
        let store = Arc::new(MemoryStore::new_writable("the image", file));
        let metadata = Metadata::new(Arc::clone(&store) as Arc<dyn Store>, bits);
        metadata.lock().clean_max = KEPT;
        let model = Model {
            page_bytes,
            now: pages.clone(),
            file: pages,
            early: BTreeSet::new(),
            late: BTreeSet::new(),
            unnamed: BTreeSet::new(),
            number: 1,
            durable: 0,
            in_two_steps: false,
            new_tables: BTreeSet::new(),
            freed: Vec::new(),
            zeroed: BTreeSet::new(),
            group: None,
        };
        let cluster_pages = bits.bytes() / page_bytes as u64;
        let (loads, pins) = (Vec::new(), Vec::new());
        let mut run = Run { rng, metadata: &metadata, store, model, cluster_pages, loads, pins };
        for _ in 0..STEPS {
            run.step();
            run.check();
        }
    });
}
