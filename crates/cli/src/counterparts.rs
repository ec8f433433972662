//! What qemu-img has and mica has not: who asks for it is told what to use.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Verbs of qemu-img, and what does the same.
const VERBS: &[(&str, &str)] = &[];

/// Options of qemu-img, and what to do instead.
const OPTIONS: &[(&str, &str)] = &[
    ("--image-opts", "name the image, and its format with --format"),
    ("--object", "--secret FILE names the passphrase of encrypted images"),
    ("--connect", "nbd-client connects the kernel to a server"),
    ("--salvage", "use qemu-img convert --salvage"),
    ("--selinux-label", "systemd labels sockets, and passes them to mica"),
    ("--target-image-opts", "name the target, and its format with -O"),
    ("--tls-authz", "who has a certificate of the CA is admitted: use a CA for these clients"),
    ("-T", "use --cache for how images are read"),
    ("-t", "use --cache for how images are read and written"),
    ("-i", "use --aio for how I/O is done"),
    ("-C", "mica has no copy offloading: leave it out"),
];

/// One line about a command line that means something to qemu-img only.
pub(crate) fn of(error: &clap::Error) -> Option<String> {
    let (context, table) = match error.kind() {
        ErrorKind::InvalidSubcommand => (ContextKind::InvalidSubcommand, VERBS),
        ErrorKind::UnknownArgument => (ContextKind::InvalidArg, OPTIONS),
        _ => return None,
    };
    let Some(ContextValue::String(word)) = error.get(context) else { return None };
    let (_, hint) = table.iter().find(|(name, _)| name == word)?;
    Some(format!("mica has no {word}: {hint}"))
}
