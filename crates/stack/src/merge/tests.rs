use super::*;
use crate::mark::Mark;
use crate::merged::was_merged;
use crate::{FileImages, Format, MayWrite, open_writable, refuse_merged};
use mica_block::{Images as _, LocalFuture, MergeProgress};
use mica_qcow2::ChainOptions;
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_rt::{Backend, Buf, Executor};
use mica_store::{Handles, Holder, find_holder, search_holders_with};
use mica_units::{GuestOffset, GuestRange};
use std::cell::RefCell;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tempfile::TempDir;

const LEN: u64 = 8 << 20;

fn executor() -> Executor {
    Executor::new(Backend::Pool).expect("an executor")
}

fn refusal() -> Error {
    Error::new(ErrorKind::Denied, "another disk needs it")
}

/// A chain, its base in a folder of its own.
struct World {
    _folder: TempDir,
    layers: Vec<PathBuf>,
    disk: Arc<dyn Manage>,
}

impl World {
    /// With `base.qcow2` and layers with these `names` above, each of which owns something.
    fn new(names: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let real = folder.path().canonicalize().expect("a folder");
        let mut layers = vec![real.join("below/base.qcow2")];
        layers.extend(names.iter().map(|name| real.join("disk").join(name)));
        for folder in ["below", "disk"] {
            fs::create_dir(real.join(folder)).expect("made");
        }
        for (at, layer) in layers.iter().enumerate() {
            make(layer, at.checked_sub(1).map(|base| &*layers[base]));
            let disk = opened(layer, &real);
            executor().block_on(async {
                for start in [0, 4 << 20, own_place(at)] {
                    let buf = Buf::from_slice(&[u8::try_from(at).expect("few"); 4096]);
                    disk.write(GuestOffset::new(start), buf).await.0.expect("written");
                }
                disk.close().await.expect("closed");
            });
        }
        let disk = opened(layers.last().expect("the base"), &real);
        Self { _folder: folder, layers, disk }
    }

    fn commit(&self, merged: RangeInclusive<usize>) -> Merge {
        Merge::commit(&self.layers, merged, ActiveAfter::Emptied, GoneImages::MayBeMoved)
    }

    fn drop_state(&self, state: usize) -> Merge {
        Merge::drop_state(&self.layers, state, options(&self.layers[0]), GoneImages::MayBeMoved)
    }

    fn run(&self, prepared: Prepared, control: &dyn MergeControl) -> Result<Ended> {
        executor().block_on(prepared.run(&*self.disk, control))
    }
}

/// Where only the layer at a position has something of its own.
fn own_place(position: usize) -> u64 {
    (position as u64 + 1) << 19
}

fn options(allowed: &Path) -> ImageOptions {
    let mut options = ImageOptions::new(Handles::new(32));
    options.allow_paths.push(allowed.to_owned());
    options
}

fn mark_of(layer: &Path) -> PathBuf {
    let mut at = layer.as_os_str().to_owned();
    at.push(".mica-merged");
    at.into()
}

/// Whether the mark of the layer does not count yet.
fn is_planned(layer: &Path) -> bool {
    fs::read(mark_of(layer)).expect("marked").ends_with(b"planned\n")
}

fn make(layer: &Path, base: Option<&Path>) {
    let wish = ImageWish {
        backing_name: base.map(|base| base.as_os_str().to_owned()),
        backing_format: base.map(|_| "qcow2".to_owned()),
        ..ImageWish::default()
    };
    File::create(layer).expect("a file");
    let images = FileImages::to_write(layer, options(layer), MayWrite::new_file()).expect("images");
    let store = images.open_writable(layer).expect("it opens").store;
    let plan = wish.plan(LEN).expect("a plan");
    executor().block_on(create(plan, Stores { image: &*store, data: None })).expect("created");
}

fn opened(image: &Path, allowed: &Path) -> Arc<dyn Manage> {
    let (options, chain) = (options(allowed), ChainOptions::default());
    let opening = open_writable(image, Format::Qcow2, options, &chain);
    executor().block_on(opening).expect("it opens")
}

/// Looks at something before each step, and ends the merge at the step of this number.
struct Watching<'a, T> {
    look: &'a dyn Fn() -> T,
    seen: RefCell<Vec<T>>,
    ends_at: usize,
}

impl<'a, T> Watching<'a, T> {
    fn new(look: &'a dyn Fn() -> T, ends_at: usize) -> Self {
        Self { look, seen: RefCell::default(), ends_at }
    }
}

impl<T> MergeControl for Watching<'_, T> {
    fn step(&self, _: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        let mut seen = self.seen.borrow_mut();
        seen.push((self.look)());
        let flow = match seen.len() > self.ends_at {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        Box::pin(std::future::ready(flow))
    }
}

const NEVER: usize = usize::MAX;

#[test]
fn commit_has_its_layers_marked_before_it_asks_and_the_marks_count_before_it_changes_one() {
    let world = World::new(&["one", "two", "active"]);
    let [base, one, two, active] = &world.layers[..] else { panic!("four layers") };
    let merge = world.commit(0..=2);
    assert_eq!(merge.kind(), "commit");
    let prepared = merge.prepare(|needed| {
        assert_eq!(needed, [base, one, two].map(Clone::clone));
        for layer in needed {
            refuse_merged(layer).expect_err("nobody makes an image on it meanwhile");
        }
        Ok(())
    });
    let prepared = prepared.expect("nobody needs them");
    let look = || [base, one, two].map(|layer| is_planned(layer));
    let control = Watching::new(&look, NEVER);
    let ended = world.run(prepared, &control).expect("merged");
    let seen = control.seen.into_inner();
    assert_eq!(seen[0], [true; 3]);
    assert!(seen.len() > 1 && seen[1..].iter().all(|planned| *planned == [false; 3]), "{seen:?}");
    let Merged::Done { dropped, .. } = ended.merged else { panic!("it is done") };
    assert_eq!(dropped, [one, two].map(Clone::clone));
    assert_eq!(world.disk.layer_paths(), [base, active].map(Clone::clone));
    refuse_merged(base).expect("it is whole");
    assert!(was_merged(one) && was_merged(two) && ended.settled.file.is_none());
    ended.settled.marks.and(ended.settled.drops).expect("settled");
}

#[test]
fn commit_that_is_given_up_keeps_its_marks_if_the_base_may_have_a_part_of_it() {
    let world = World::new(&["one", "active"]);
    for (ends_at, marks) in [(0, 0), (1, 2), (NEVER, 1)] {
        let prepared = world.commit(0..=2).prepare(|_| Ok(())).expect("prepared");
        let ended = world.run(prepared, &Watching::new(&|| (), ends_at)).expect("no failure");
        assert_eq!(ended.merged == Merged::Cancelled, ends_at != NEVER);
        let marked = world.layers.iter().filter(|layer| mark_of(layer).exists());
        assert_eq!(marked.count(), marks, "given up at step {ends_at}");
    }
}

#[test]
fn merge_that_is_refused_or_not_begun_leaves_no_marks() {
    let world = World::new(&["disk@a.qcow2", "disk.qcow2"]);
    let unmarked = || world.layers.iter().all(|layer| !mark_of(layer).exists());
    let refused = world.commit(0..=1).prepare(|_| Err(refusal())).err().expect("refused");
    assert!(refused.to_string().contains("another disk") && unmarked());
    let refused = world.drop_state(1).prepare(|_| Err(refusal())).err().expect("refused");
    assert!(refused.to_string().contains("another disk") && unmarked());
    drop(world.commit(0..=1).prepare(|_| Ok(())).expect("prepared"));
    assert!(unmarked());
    make(&world.layers[1].with_file_name("clone"), Some(&world.layers[1]));
    for merge in [world.commit(0..=2), world.drop_state(1)] {
        let refused = merge.prepare(|_| Ok(())).err().expect("refused");
        assert!(refused.to_string().contains("clone stands on"), "{refused}");
        assert!(unmarked());
    }
    // What stands on a layer that stays as it is is in nobody's way.
    let merge = Merge::stream(&world.layers, None);
    let prepared = merge.prepare(|_| panic!("nobody is asked")).expect("prepared");
    world.run(prepared, &Watching::new(&|| (), NEVER)).expect("merged");
    assert!(unmarked());
}

/// A base in another folder is found to have an image on it only by its note.
#[test]
fn base_has_the_note_of_the_layer_above_before_that_stands_on_it() {
    let world = World::new(&["one", "active"]);
    let note = world.layers[0].with_file_name("base.qcow2.mica-overlays");
    let line = world.layers[2].display().to_string();
    let merge = Merge::stream(&world.layers, Some(0));
    assert_eq!(merge.kind(), "stream");
    let prepared = merge.prepare(|_| Ok(())).expect("prepared");
    let look = || fs::read_to_string(&note).is_ok_and(|note| note.contains(&line));
    let control = Watching::new(&look, NEVER);
    let ended = world.run(prepared, &control).expect("merged");
    assert!(control.seen.into_inner().into_iter().all(|noted| noted) && look());
    assert_eq!(world.disk.layer_paths(), [&world.layers[0], &world.layers[2]].map(Clone::clone));
    ended.settled.marks.and(ended.settled.drops).expect("settled");
}

/// Into the active layer, and into another state.
#[test]
fn dropped_state_goes_up_and_its_file_goes_with_its_mark() {
    let world = World::new(&["disk@a.qcow2", "disk@b.qcow2", "disk.qcow2"]);
    for state in [1, 2] {
        let layers = world.disk.layer_paths();
        let at = layers.iter().position(|layer| *layer == world.layers[state]).expect("a layer");
        let options = options(&world.layers[0]);
        let merge = Merge::drop_state(&layers, at, options, GoneImages::MayBeMoved);
        assert_eq!(merge.kind(), "drop");
        let prepared = merge.prepare(|needed| {
            assert_eq!(needed, std::slice::from_ref(&world.layers[state]));
            Ok(())
        });
        let look = || is_planned(&world.layers[state]);
        let control = Watching::new(&look, NEVER);
        let ended = world.run(prepared.expect("prepared"), &control).expect("merged");
        assert!(control.seen.into_inner().iter().all(|planned| !planned), "it counts at once");
        let file = ended.settled.file.expect("it had one");
        file.removed.expect("removed");
        assert!(!file.path.exists() && !mark_of(&file.path).exists());
    }
    assert_eq!(world.disk.layer_count(), 2);
}

#[test]
fn file_of_a_dropped_state_that_somebody_reads_stays_and_is_the_users() {
    let world = World::new(&["disk@a.qcow2", "disk.qcow2"]);
    let state = &world.layers[1];
    let reader = FileImages::new(state, options(&world.layers[0])).expect("allowed");
    let open = reader.open(state).expect("opened");
    let prepared = world.drop_state(1).prepare(|_| Ok(())).expect("prepared");
    let ended = world.run(prepared, &Watching::new(&|| (), NEVER)).expect("merged");
    drop(open);
    ended.settled.file.expect("it had one").removed.expect_err("it is in use");
    ended.settled.drops.expect("forgotten");
    assert!(state.exists() && !mark_of(state).exists());
}

/// A disk may go on there, as far as marks say.
#[test]
fn file_of_a_dropped_state_stays_if_a_mark_leads_there_and_none_on() {
    let world = World::new(&["disk@a.qcow2", "disk.qcow2"]);
    let [base, state, active] = &world.layers[..] else { panic!("three layers") };
    Mark::put(base, state).expect("marked");
    let prepared = world.drop_state(1).prepare(|_| Ok(())).expect("prepared");
    let ended = world.run(prepared, &Watching::new(&|| (), NEVER)).expect("merged");
    let said = ended.settled.marks.expect_err("it leads there").to_string();
    assert!(said.contains("base.qcow2.mica-above"), "{said}");
    ended.settled.file.expect("it had one").removed.expect_err("it stays");
    assert_eq!(world.disk.layer_paths(), [base, active].map(Clone::clone));
    assert!(state.exists() && mark_of(state).exists(), "the next drop tries it again");
}

/// What is exported beside a merge has only layers beneath that one.
#[test]
fn merge_knows_the_lowest_frozen_layer_that_it_changes() {
    let world = World::new(&["disk@a.qcow2", "disk@b.qcow2", "disk.qcow2"]);
    let lowest = |merge: Merge| merge.prepare(|_| Ok(())).expect("prepared").lowest_changed();
    assert_eq!(lowest(Merge::stream(&world.layers, Some(0))), None);
    assert_eq!(lowest(world.commit(1..=3)).as_ref(), Some(&world.layers[1]));
    for state in [1, 2] {
        assert_eq!(lowest(world.drop_state(state)).as_ref(), Some(&world.layers[state]));
    }
}

/// The layers of a chain that nobody has open.
struct Closed {
    _folder: TempDir,
    layers: Vec<PathBuf>,
}

impl World {
    fn close(self) -> Closed {
        let Self { _folder, layers, disk } = self;
        executor().block_on(disk.close()).expect("closed");
        Closed { _folder, layers }
    }

    /// Runs the merge of layers into the base, and leaves the mark of that, as if it had been
    /// killed when all but that was done.
    fn commit_but_the_mark(self, merged: RangeInclusive<usize>) -> Closed {
        let mark = mark_of(&self.layers[0]);
        let look = || fs::read(&mark).expect("marked");
        let control = Watching::new(&look, NEVER);
        let prepared = self.commit(merged).prepare(|_| Ok(())).expect("nobody needs them");
        self.run(prepared, &control).expect("merged");
        assert!(!mark.exists());
        let seen = control.seen.into_inner();
        fs::write(&mark, seen.last().expect("steps")).expect("written");
        refuse_merged(&self.layers[0]).expect_err("nobody knows that it is whole");
        self.close()
    }
}

impl Closed {
    fn active(&self) -> &Path {
        self.layers.last().expect("layers")
    }

    fn allowed(&self) -> &Path {
        self.layers[0].parent().and_then(Path::parent).expect("a folder")
    }

    /// Opens the image at `layer` for writing.
    fn open(&self, layer: &Path) -> Arc<dyn Manage> {
        opened(layer, self.allowed())
    }

    /// The same, and closes it. Whether the base is whole then, as far as its mark says.
    fn is_whole_after(&self, layer: &Path) -> bool {
        executor().block_on(self.open(layer).close()).expect("closed");
        refuse_merged(&self.layers[0]).is_ok()
    }
}

/// The story: a commit was killed when all but its last step was done. The mark of its base kept
/// everybody from making images on that, until somebody happened to commit something else into it.
#[test]
fn mark_of_a_base_whose_commit_was_done_goes_when_its_chain_is_opened_for_writing() {
    let closed = World::new(&["one", "active"]).commit_but_the_mark(0..=1);
    assert!(closed.is_whole_after(closed.active()), "layers left");
    assert!(was_merged(&closed.layers[1]), "that of what was merged stays");

    let closed = World::new(&["one", "active"]).commit_but_the_mark(0..=2);
    assert!(closed.is_whole_after(closed.active()), "layers left, and the active one is empty");

    let closed = World::new(&["active"]).commit_but_the_mark(0..=1);
    assert!(closed.is_whole_after(closed.active()), "the active one is empty");
}

#[test]
fn mark_of_a_base_that_may_have_only_a_part_stays_when_its_chain_is_opened_for_writing() {
    for names in [&["one", "active"][..], &["active"]] {
        let world = World::new(names);
        let prepared = world.commit(0..=1).prepare(|_| Ok(())).expect("nobody needs them");
        let ended = world.run(prepared, &Watching::new(&|| (), 1)).expect("given up");
        assert_eq!(ended.merged, Merged::Cancelled);
        let closed = world.close();
        assert!(!closed.is_whole_after(closed.active()), "{names:?}: it was given up");
    }
    // Nobody knows any more whether it was done: the layer got something of its own since.
    let closed = World::new(&["active"]).commit_but_the_mark(0..=1);
    let mark = mark_of(&closed.layers[0]);
    let content = fs::read(&mark).expect("marked");
    let disk = closed.open(closed.active());
    executor().block_on(async {
        disk.write(GuestOffset::new(0), Buf::from_slice(&[7; 4096])).await.0.expect("written");
        disk.close().await.expect("closed");
    });
    drop(disk);
    fs::write(&mark, &content).expect("written");
    assert!(!closed.is_whole_after(closed.active()), "it is not empty");
}

#[test]
fn mark_of_a_base_stays_while_somebody_has_it_locked_and_if_another_chain_is_opened() {
    let closed = World::new(&["one", "active"]).commit_but_the_mark(0..=1);
    let base = &closed.layers[0];
    // Another program does not look at marks.
    let clone = base.with_file_name("clone");
    make(&clone, Some(base));
    assert!(!closed.is_whole_after(&clone), "it is not the layer that was to stand on it");
    let merging = File::open(mark_of(base)).expect("marked");
    rustix::fs::flock(&merging, rustix::fs::FlockOperation::LockExclusive).expect("locked");
    assert!(!closed.is_whole_after(closed.active()), "a commit is under way");
    drop(merging);
    assert!(closed.is_whole_after(closed.active()));
}

/// The story: somebody who only read the base was killed, and a commit that began just then was
/// refused, where everybody else waits for a moment.
#[test]
fn commit_waits_until_the_system_lets_go_of_what_a_killed_process_had_open() {
    let world = World::new(&["one", "active"]);
    let base = &world.layers[0];
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(base).expect("there"));
    search_holders_with(move |question| match question.inode == inode {
        true => Holder::Nobody,
        false => find_holder(question),
    });
    let reader = FileImages::new(base, options(base)).expect("images");
    let reader = reader.open(base).expect("it opens");
    let prepared = world.commit(0..=1).prepare(|_| Ok(())).expect("nobody needs them");
    let (begun, begins) = mpsc::channel();
    let released = std::thread::spawn(move || {
        begins.recv().expect("it begins");
        executor().block_on(async { mica_rt::sleep(Duration::from_millis(700)).await });
        drop(reader);
    });
    begun.send(()).expect("it waits");
    let ended = world.run(prepared, &Watching::new(&|| (), NEVER)).expect("merged");
    assert!(matches!(ended.merged, Merged::Done { .. }), "{ended:?}");
    released.join().expect("it let go");
}

/// What `disk` shows in places of which each is about a layer, or about all.
fn shown_by(disk: &dyn Manage) -> Vec<u8> {
    let mut shown = Vec::new();
    executor().block_on(async {
        for start in (0..LEN).step_by(1 << 19) {
            let range = GuestRange::new(GuestOffset::new(start), 512).expect("a sector");
            let plan = disk.plan(range, Vec::new()).finish().await.expect("planned");
            shown.push(mica_block::read_whole(disk, &plan).await.expect("read")[0]);
        }
    });
    shown
}

/// What the disk of the image at `path`, which nobody writes, shows.
fn content(path: &Path, allowed: &Path) -> Vec<u8> {
    let chain = ChainOptions::default();
    let opening = crate::open(path, Format::Qcow2, options(allowed), &chain);
    shown_by(&*executor().block_on(opening).expect("it opens"))
}

impl World {
    fn allowed(&self) -> PathBuf {
        self._folder.path().canonicalize().expect("a folder")
    }

    /// What each layer shows.
    fn contents(&self) -> Vec<Vec<u8>> {
        let frozen = &self.layers[..self.layers.len() - 1];
        let shown = frozen.iter().map(|layer| content(layer, &self.allowed()));
        shown.chain([shown_by(&*self.disk)]).collect()
    }

    /// Runs `merge`, which ends at the step of this number, if not before. Returns whether it was
    /// done.
    fn merges(&self, merge: Merge, ends_at: usize) -> bool {
        let prepared = merge.prepare(|_| Ok(())).expect("nobody needs them");
        let ended = self.run(prepared, &Watching::new(&|| (), ends_at)).expect("no failure");
        matches!(ended.merged, Merged::Done { .. })
    }

    /// Whether an image may stand on the layer at this position.
    fn is_free(&self, position: usize) -> bool {
        refuse_merged(&self.layers[position]).is_ok()
    }
}

/// The story: a commit of two layers was killed, and the one of the lower of them, which came after
/// it, took the mark of the base away. A clone of that showed a part of the upper one.
#[test]
fn base_has_its_mark_until_it_has_all_of_what_it_has_a_part_of() {
    let mut mixtures = 0;
    for ends_at in 1.. {
        let world = World::new(&["one", "two", "active"]);
        let shown = world.contents();
        if world.merges(world.commit(0..=2), ends_at) {
            break;
        }
        assert!(world.merges(world.commit(0..=1), NEVER));
        mixtures += u32::from(content(&world.layers[0], &world.allowed()) != shown[1]);
        assert!(!world.is_free(0), "given up at step {ends_at}");
        let layers = world.disk.layer_paths();
        let rest = |active| Merge::commit(&layers, 0..=1, active, GoneImages::MayBeMoved);
        assert!(!world.merges(rest(ActiveAfter::Emptied), 1) && !world.is_free(0));
        assert!(world.merges(rest(ActiveAfter::Emptied), NEVER) && world.is_free(0));
        assert_eq!(content(&world.layers[0], &world.allowed()), shown[2]);
        assert_eq!(shown_by(&*world.disk), shown[3]);
    }
    assert!(mixtures > 0, "nothing of the upper one was copied");
}

/// As the base of another commit has only a part, what that goes into has.
#[test]
fn base_that_a_base_with_a_part_goes_into_gets_a_mark_that_stays() {
    let world = World::new(&["one", "two", "active"]);
    let shown = world.contents();
    assert!(!world.merges(world.commit(1..=2), 3) && !world.is_free(1));
    let refused = world.commit(0..=1).prepare(|_| Err(refusal())).err();
    refused.expect("refused");
    assert!(!was_merged(&world.layers[1]), "what it was before, it is");
    assert!(world.merges(world.commit(0..=1), NEVER) && !world.is_free(0));
    let layers = world.disk.layer_paths();
    let rest = Merge::commit(&layers, 0..=1, ActiveAfter::Emptied, GoneImages::MayBeMoved);
    assert!(world.merges(rest, NEVER) && world.is_free(0));
    assert_eq!(content(&world.layers[0], &world.allowed()), shown[2]);
}

/// A layer stands on the base then, and nothing has gone down.
#[test]
fn base_with_a_part_has_its_mark_when_what_was_to_go_down_went_up() {
    let world = World::new(&["one", "two", "active"]);
    let shown = world.contents();
    assert!(!world.merges(world.commit(0..=2), 4));
    assert!(!world.merges(Merge::stream(&world.layers, Some(0)), 1));
    assert!(world.merges(Merge::stream(&world.layers, Some(0)), NEVER));
    let [base, active] = &world.disk.layer_paths()[..] else { panic!("two layers") };
    let (base, active) = (base.clone(), active.clone());
    let closed = world.close();
    assert!(!closed.is_whole_after(&active), "it has a part of a layer that left");
    let disk = closed.open(&active);
    let layers = [base.clone(), active.clone()];
    let all = Merge::commit(&layers, 0..=1, ActiveAfter::Emptied, GoneImages::MayBeMoved);
    let prepared = all.prepare(|_| Ok(())).expect("nobody needs them");
    executor().block_on(prepared.run(&*disk, &Watching::new(&|| (), NEVER))).expect("merged");
    refuse_merged(&base).expect("it has all");
    executor().block_on(disk.close()).expect("closed");
    drop(disk);
    assert_eq!(content(&active, closed.allowed()), shown[3]);
}

/// The layer that the mark names is not there any more when the rest goes down.
#[test]
fn mark_of_a_base_goes_with_what_a_layer_that_it_names_went_into() {
    let world = World::new(&["one", "two", "active"]);
    let shown = world.contents();
    assert!(!world.merges(world.commit(0..=1), 2));
    assert!(!world.merges(world.commit(1..=2), 2), "and it is as before");
    assert!(world.merges(world.commit(1..=2), NEVER) && !world.is_free(0));
    let layers = world.disk.layer_paths();
    let rest = Merge::commit(&layers, 0..=1, ActiveAfter::Emptied, GoneImages::MayBeMoved);
    assert!(world.merges(rest, NEVER) && world.is_free(0));
    assert_eq!(content(&world.layers[0], &world.allowed()), shown[2]);
}
