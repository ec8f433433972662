//! What a file that is not a qcow2 image may be. That is a hint in an error, for people: nothing is
//! opened because of it.

/// How the files begin, and the names that qemu-img has for these formats.
const FORMATS: &[(&[u8], &str)] = &[
    (b"KDMV", "vmdk"),
    (b"COWD", "vmdk"),
    (b"# Disk DescriptorFile", "vmdk"),
    (b"vhdxfile", "vhdx"),
    (b"conectix", "vpc"),
    (b"QED\0", "qed"),
    (b"WithoutFreeSpace", "parallels"),
    (b"WithouFreSpacExt", "parallels"),
];
const LUKS_MAGIC: &[u8] = b"LUKS\xba\xbe";
/// VDI has text of any kind in front of its magic.
const VDI_MAGIC: (usize, [u8; 4]) = (64, [0x7f, 0x10, 0xda, 0xbe]);
/// How compressed files begin, and what decompresses them.
const COMPRESSED: &[(&[u8], &str)] = &[
    (b"\x1f\x8b", "gunzip"),
    (b"\xfd7zXZ\0", "unxz"),
    (b"\x28\xb5\x2f\xfd", "unzstd"),
    (b"BZh", "bunzip2"),
    (b"PK\x03\x04", "unzip"),
];

/// Says what a file with these first bytes may be, and what to do with it.
pub(crate) fn describe(first_bytes: &[u8]) -> String {
    let begins = |magic: &[u8]| first_bytes.starts_with(magic);
    let (vdi_at, vdi) = VDI_MAGIC;
    if first_bytes.is_empty() {
        return "it is 0 bytes long".to_owned();
    }
    if begins(LUKS_MAGIC) {
        return "it looks like luks: add --format luks --secret FILE (or for a backing file -F luks), \
                where FILE holds the passphrase"
            .to_owned();
    }
    if let Some((_, format)) = FORMATS.iter().find(|(magic, _)| begins(magic)) {
        return translate(format);
    }
    if first_bytes.get(vdi_at..).is_some_and(|rest| rest.starts_with(&vdi)) {
        return translate("vdi");
    }
    if let Some((_, tool)) = COMPRESSED.iter().find(|(magic, _)| begins(magic)) {
        return format!("it looks compressed: {tool} it first");
    }
    let start: String = first_bytes.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!(
        "it starts with 0x{start} instead of 0x514649fb (QFI\\xfb): if it is raw, state that with \
         --format raw, or for a backing file with -F raw"
    )
}

fn translate(format: &str) -> String {
    format!("it looks like {format}: translate it with qemu-img convert -f {format} -O qcow2")
}

#[cfg(test)]
mod tests {
    use super::describe;

    #[test]
    fn the_first_bytes_say_what_a_file_may_be() {
        let mut vdi = [b'<'; 128];
        vdi[64..68].copy_from_slice(&[0x7f, 0x10, 0xda, 0xbe]);
        assert!(describe(&vdi).contains("-f vdi "));
        assert!(describe(b"KDMV\x01\0").contains("-f vmdk "));
        assert!(describe(b"\x1f\x8b\x08").contains("gunzip"));
        assert!(describe(b"LUKS\xba\xbe\0\x01").contains("--format luks --secret FILE"));
        assert_eq!(describe(b""), "it is 0 bytes long");
        assert!(describe(b"\xeb").contains("0xeb instead") && describe(b"\xeb").contains("raw"));
    }
}
