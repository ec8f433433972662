//! Files, formats, verbs and options that mica does not know: the error says what to do.

use mica_tests::{command, mica, qemu, tools};
use std::fs;
use std::path::Path;
use std::process::Command;

#[track_caller]
fn refused(dir: &Path, words: &str) -> String {
    let args = words.split(' ');
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args)).refusal()
}

#[test]
fn a_file_of_another_format_is_named_but_not_opened() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for format in ["vmdk", "vdi", "vpc", "vhdx", "qed", "parallels"] {
        qemu::img(dir, ["create", "-q", "-f", format, "image", "1M"]).ok();
        for verb in ["info", "map", "check", "convert -O raw image copy --log-level off"] {
            let words = if verb.contains(' ') { verb.to_owned() } else { format!("{verb} image") };
            let said = refused(dir, &words);
            let wanted = format!("qemu-img convert -f {format} -O qcow2");
            assert!(said.contains("image") && said.contains(&wanted), "{words}: {said}");
        }
    }
    for (bytes, wanted) in [
        (&b""[..], "0 bytes long"),
        (b"\x1f\x8b\x08", "gunzip"),
        (b"\xfd7zXZ\0", "unxz"),
        (b"\x28\xb5\x2f\xfd", "unzstd"),
        (b"\xeb\x63\x90", "--format raw"),
    ] {
        fs::write(dir.join("image"), bytes).expect("written");
        let said = refused(dir, "info image");
        assert!(said.contains(wanted), "{said}");
    }
}

#[test]
fn what_only_qemu_img_has_is_answered_with_what_to_use() {
    let dir = tempfile::tempdir().expect("a folder");
    for (words, wanted) in [
        ("info --image-opts driver=qcow2", "--format"),
        ("info --object secret,id=s,file=f image", "--secret FILE"),
        ("convert --salvage a b", "qemu-img convert --salvage"),
        ("info -f vmdk image", "qemu-img convert"),
        ("convert -O vdi a b", "qemu-img convert"),
        ("create -f vhdx image 1M", "qemu-img convert"),
    ] {
        let said = refused(dir.path(), words);
        assert!(said.contains(wanted), "{words}: {said}");
    }
}
