use super::*;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use tempfile::TempDir;

/// A folder with a base and a layer; what matters of them is that they are files.
fn world() -> (TempDir, PathBuf, PathBuf) {
    let (folder, [base, layer]) = world_of(["base", "layer"]);
    (folder, base, layer)
}

/// A folder with images of these names.
pub(super) fn world_of<const N: usize>(names: [&str; N]) -> (TempDir, [PathBuf; N]) {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path().canonicalize().expect("a folder");
    let paths = names.map(|name| at.join(format!("{name}.qcow2")));
    for path in &paths {
        fs::write(path, b"image").expect("written");
    }
    (folder, paths)
}

/// The mark of a base that has only a part of something until then.
pub(super) fn mark_base(base: &Path, until: Until) -> MergeMarks {
    MergeMarks::put(base, &[], until).expect("marked")
}

fn put(base: &Path, layer: &PathBuf) -> MergeMarks {
    let above = FileMark { inode: 7, made_ns: 0 };
    MergeMarks::put(base, std::slice::from_ref(layer), Until::Beneath(above)).expect("marked")
}

/// Lets a merge that `marks` watch begin to change something.
pub(super) fn begin(marks: &MergeMarks) {
    struct GoesOn;
    impl MergeControl for GoesOn {
        fn step(&self, _: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
            Box::pin(std::future::ready(ControlFlow::Continue(())))
        }
    }
    let executor = mica_rt::Executor::new(mica_rt::Backend::Pool).expect("an executor");
    let step = async { marks.watch(&GoesOn).step(MergeProgress::default()).await };
    assert!(executor.block_on(step).is_continue());
}

fn done() -> Option<Merged> {
    Some(Merged::Done { dropped: Vec::new(), copied: 1 })
}

fn refusal(path: &Path) -> String {
    let refused = refuse_merged(path).expect_err("refused");
    assert_eq!(refused.kind(), ErrorKind::Denied);
    refused.to_string()
}

#[test]
fn nothing_may_stand_on_layers_that_are_being_merged_nor_on_one_that_was() {
    let (_folder, base, layer) = world();
    assert!(refuse_merged(&base).is_ok() && refuse_merged(&layer).is_ok());
    let marks = put(&base, &layer);
    assert!(refusal(&base).contains("wait for the end"));
    assert!(refusal(&base).contains("base.qcow2.mica-merged"), "the file that says so is named");
    assert!(refusal(&layer).contains("base.qcow2"));
    assert!(was_merged(&layer) && !was_merged(&base));
    begin(&marks);
    marks.end(done().as_ref());
    refuse_merged(&base).expect("it is whole");
    assert!(refusal(&layer).contains("base.qcow2") && was_merged(&layer));
}

#[test]
fn marks_of_a_merge_that_panics_in_the_middle_stay() {
    let (_folder, base, layer) = world();
    let marks = put(&base, &layer);
    begin(&marks);
    drop(marks);
    assert!(refusal(&base).contains("merge them again") && was_merged(&layer));
}

#[test]
fn merge_that_changed_nothing_leaves_no_marks_and_one_that_did_leaves_all() {
    let (folder, base, layer) = world();
    drop(put(&base, &layer));
    put(&base, &layer).end(None);
    put(&base, &layer).end(Some(&Merged::Cancelled));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2);
    for ended in [None, Some(Merged::Cancelled)] {
        let marks = put(&base, &layer);
        begin(&marks);
        marks.end(ended.as_ref());
        // The next attempt may be refused, and takes nothing back.
        drop(put(&base, &layer));
        assert!(refusal(&base).contains("merge them again") && was_merged(&layer));
        let marks = put(&base, &layer);
        begin(&marks);
        marks.end(done().as_ref());
        refuse_merged(&base).expect("it is whole");
        fs::remove_file(layer.with_file_name("layer.qcow2.mica-merged")).expect("removed");
    }
}

/// The story: a commit was killed while it looked for other images, and its marks kept everybody
/// from the layers until somebody committed them.
#[test]
fn marks_of_a_merge_that_died_before_it_began_are_taken_back_by_whoever_meets_them() {
    let (folder, base, layer) = world();
    let count = || fs::read_dir(folder.path()).expect("a folder").count();
    put(&base, &layer).forget_for_test();
    assert_eq!(count(), 4);
    assert!(!was_merged(&layer));
    assert_eq!(count(), 3, "its own is gone");
    refuse_merged(&base).expect("nothing was changed");
    assert_eq!(count(), 2);
    // The next merge takes their places, and takes them back, too.
    put(&base, &layer).forget_for_test();
    drop(put(&base, &layer));
    assert_eq!(count(), 2);
    put(&base, &layer).forget_for_test();
    [base, layer].iter().for_each(|layer| take_back_planned(layer));
    assert_eq!(count(), 2);
}

#[test]
fn marks_of_a_merge_that_is_alive_or_has_begun_stay() {
    let (_folder, base, layer) = world();
    let marks = put(&base, &layer);
    take_back_planned(&base);
    assert!(refusal(&base).contains("wait for the end"));
    assert!(was_merged(&layer));
    // Only one merge of a layer is under way.
    let said = MergeMarks::put(&base, &[], Until::Unsaid).expect_err("another one is").to_string();
    assert!(said.contains("is under way"), "{said}");
    begin(&marks);
    marks.forget_for_test();
    assert!(refusal(&base).contains("merge them again") && was_merged(&layer));
    // One that is planned, and dies, after one that began leaves what that left.
    put(&base, &layer).forget_for_test();
    assert!(refusal(&base).contains("merge them again") && was_merged(&layer));
}

/// The mark of the base counts first: a kill in between leaves no layer that counts as merged, and
/// whose base is said to be whole.
#[test]
fn merge_that_dies_while_its_marks_begin_to_count_leaves_that_of_its_base() {
    let (_folder, base, layer) = world();
    let marks = put(&base, &layer);
    marks.base.as_ref().expect("a file").begin().expect("written");
    marks.forget_for_test();
    assert!(!was_merged(&layer));
    refusal(&base);
}

#[test]
fn who_looks_at_a_mark_while_it_begins_to_count_sees_that() {
    let (_folder, base, layer) = world();
    let marks = put(&base, &layer);
    let mark = base.with_file_name("base.qcow2.mica-merged");
    let looking = fs::File::open(&mark).expect("there");
    let planned_then = planned::content_of(&looking).expect("read");
    assert!(planned_then.ends_with(PLANNED));
    begin(&marks);
    marks.forget_for_test();
    // Nobody has it locked any more, and what was read is out of date.
    assert!(!planned::is_dead(&looking).expect("read again"));
    planned::take_back(&mark, &looking);
    assert!(mark.exists());
}

#[test]
fn mark_counts_for_its_own_file_as_long_as_that_is_unchanged() {
    let (folder, base, layer) = world();
    let marks = put(&base, &layer);
    begin(&marks);
    // The base is being changed.
    let touch = |path: &Path| {
        let file = OpenOptions::new().write(true).open(path).expect("it opens");
        let then = file.metadata().expect("there").modified().expect("a time");
        file.set_modified(then + Duration::from_millis(1)).expect("set");
    };
    touch(&base);
    refusal(&base);
    // Another file has the layer's name.
    let aside = folder.path().join("aside");
    fs::rename(&layer, &aside).expect("renamed");
    fs::copy(&aside, &layer).expect("copied");
    assert!(!was_merged(&layer));
    refuse_merged(&layer).expect("it is another image");
    fs::rename(&aside, &layer).expect("renamed");
    assert!(was_merged(&layer));
    touch(&layer);
    assert!(!was_merged(&layer));
    marks.end(done().as_ref());
}

#[test]
fn mark_that_anybody_may_write_hides_no_image() {
    let (_folder, base, layer) = world();
    let marks = put(&base, &layer);
    begin(&marks);
    marks.forget_for_test();
    let mark = layer.with_file_name("layer.qcow2.mica-merged");
    assert!(was_merged(&layer));
    fs::set_permissions(&mark, fs::Permissions::from_mode(0o666)).expect("set");
    assert!(!was_merged(&layer));
    assert!(refusal(&layer).contains("stranger"));
}

impl MergeMarks {
    /// As if its process were killed.
    pub(super) fn forget_for_test(mut self) {
        self.forget();
    }
}

/// The story: what a commit was killed over stayed until the next one.
#[test]
fn mark_without_its_name_goes_with_the_next_writer_unless_somebody_writes_it() {
    let (_folder, base, layer) = world();
    let new = base.with_file_name("base.qcow2.mica-merged.tmp");
    let executor = mica_rt::Executor::new(mica_rt::Backend::Pool).expect("an executor");
    let options = crate::ImageOptions::new(mica_store::Handles::new(16));
    let layers = [base.clone(), layer];
    let open = || executor.block_on(settle_bases(&layers, &options));
    let writing = Locked::write(&new, b"mark").expect("written");
    assert!(open().is_empty() && new.exists(), "somebody writes it");
    drop(writing);
    assert!(open().is_empty() && !new.exists(), "nobody does");
}

#[test]
fn content_decodes_to_itself_and_nothing_else_decodes() {
    let file = FileMark { inode: 7, made_ns: 1 << 70 };
    let name = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    let source_then = |into: &[u8], then| {
        let (into, changed_ns) = (name(into), -3);
        Content::Source { into, file, changed_ns, then }
    };
    let source = |into: &[u8]| source_then(into, Then::Stays);
    let dropped = source_then(b"/a b\nfile: 1 2 3", Then::Goes);
    let base = |until| Content::Base { file, until };
    let above = FileMark { inode: 1 << 60, made_ns: 0 };
    let bases = [Until::Unsaid, Until::Beneath(above), Until::Empty(above)].map(base);
    let sources = [source(b"/a b\nfile: 1 2 3"), source(b"\xff"), dropped];
    for content in bases.into_iter().chain(sources) {
        let bytes = content.encode();
        assert_eq!(Content::decode(&bytes), Some(content));
        assert!(is_merge_mark(&bytes));
    }
    let bytes = source(b"/a b").encode();
    for len in 0..bytes.len() {
        assert_eq!(Content::decode(&bytes[..len]), None, "{len}");
    }
    for bytes in [&b"base\n"[..], b"file: 1 2\n", b"base\nfile: 1 2"] {
        assert_eq!(Content::decode(bytes), None, "{bytes:?}");
    }
    let damaged: [&[u8]; 9] = [
        b"",
        b"base\nfile: 1\n",
        b"base until beneath: 1\nfile: 1 2\n",
        b"base until empty: 1 2 3\nfile: 1 2\n",
        b"base until: 1 2\nfile: 1 2\n",
        b"base\nfile: 1 2 3\n",
        b"into: \nfile: 1 2 3\n",
        b"into: a\nfile: 1 2\n",
        b"into: a\0\nfile: 1 2 3\n",
    ];
    damaged.iter().for_each(|bytes| assert_eq!(Content::decode(bytes), None));
}

#[test]
fn page_says_what_the_code_does() {
    const PAGE: &str = include_str!("../../../../docs/formats/merged.md");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
    let rows = [
        ("SUFFIX", SUFFIX.to_owned()),
        ("NEW_MERGED", NEW_MERGED.to_owned()),
        ("INTO", text(INTO)),
        ("DROPPED_INTO", text(DROPPED_INTO)),
        ("BASE", text(BASE)),
        ("BENEATH", text(BENEATH)),
        ("EMPTY", text(EMPTY)),
        ("FILE", text(FILE)),
        ("PLANNED", text(PLANNED).trim_end().to_owned()),
    ];
    for (name, value) in rows {
        assert!(PAGE.contains(&format!("| `{name}` | `{value}` |")), "{name}");
    }
    assert!(PAGE.contains(&format!("| `CONTENT_BYTES_MAX` | {CONTENT_BYTES_MAX} |")));
}
