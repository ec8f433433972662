//! What qemu-img has and mica has not: who asks for it is told what to use.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Verbs of qemu-img, and what does the same.
const VERBS: &[(&str, &str)] = &[
    ("amend", "use qemu-img amend while nothing has the image open"),
    ("bench", "use fio on what `mica serve` serves, or qemu-img bench"),
    ("dd", "use `mica read` and `mica write`"),
];

/// Options of qemu-img, and what to do instead.
const OPTIONS: &[(&str, &str)] = &[
    ("--bitmaps", "use qemu-img convert --bitmaps"),
    ("--image-opts", "name the image, and its format with --format"),
    ("--object", "secrets and encryption need qemu-img"),
    ("--salvage", "use qemu-img convert --salvage"),
    ("--target-image-opts", "name the target, and its format with -O"),
    ("-T", "use --cache for how images are read"),
    ("-t", "a target is written through the page cache and synced at the end"),
    ("-C", "mica has no copy offloading: leave it out"),
    ("-r", "mica has no rate limit for copies: leave it out"),
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
