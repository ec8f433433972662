//! What qemu-img has and mica has not: who asks for it is told what to use.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// An option that qemu-img or qemu-nbd has.
struct Foreign {
    names: &'static [&'static str],
    /// The verb for which this holds; any other if it is empty.
    verb: &'static str,
    /// What to do instead.
    hint: &'static str,
}

const fn option(verb: &'static str, names: &'static [&'static str], hint: &'static str) -> Foreign {
    Foreign { names, verb, hint }
}

/// Options, those of a certain verb first.
const OPTIONS: &[Foreign] = &[
    option("serve", &["-t", "--persistent"], "it serves on when a client leaves: leave it out"),
    option("serve", &["-k", "--socket"], "use --nbd PATH"),
    option("serve", &["-p", "--port", "-b", "--bind"], "use --nbd tcp:HOST:PORT"),
    option("serve", &["-c", "--connect", "-d", "--disconnect"], KERNEL),
    option("serve", &["-v", "--verbose"], "use --log-level info"),
    option("serve", &["-L", "--list"], "nbdinfo --list shows the exports of a server"),
    option("serve", &["-n", "--nocache"], "use --cache none"),
    option("serve", &["-P"], "use --partition"),
    option("serve", &["--tls-creds"], "use --tls-certificates DIR"),
    option("resize", &["--preallocation"], "what is added takes no space: use qemu-img resize"),
    option("commit", &["-r"], "mica ctl commit --rate bounds a merge of a disk that is served"),
    option("rebase", &["-c"], "mica convert -c compresses a copy"),
    option("amend", &["-p"], "it takes a moment: leave it out"),
    option("map", &["-l", "--max-len"], "use --max-length"),
    option("measure", &["-s"], "use --size"),
    option("check", &["-t"], "use --cache for how images are read"),
    option("", &["--image-opts"], "name the image, and its format with --format"),
    option("", &["--object"], "--secret FILE names the passphrase of encrypted images"),
    option("", &["--connect"], KERNEL),
    option("", &["--salvage"], "use qemu-img convert --salvage"),
    option("", &["--selinux-label"], "systemd labels sockets, and passes them to mica"),
    option("", &["--target-image-opts"], "name the target, and its format with -O"),
    option(
        "",
        &["--tls-authz"],
        "who has a certificate of the CA is admitted: use a CA for these clients",
    ),
    option("", &["-T"], "use --cache for how images are read"),
    option("", &["-t"], "use --cache for how images are read and written"),
    option("", &["-i"], "use --aio for how I/O is done"),
    option("", &["-C"], "mica has no copy offloading: leave it out"),
];

const KERNEL: &str = "nbd-client connects the kernel to a server";

/// One line about a command line that means something to qemu-img only.
pub(crate) fn of(error: &clap::Error, verb: Option<&str>) -> Option<String> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return None };
    let counts = |option: &&Foreign| option.verb.is_empty() || Some(option.verb) == verb;
    let mut found = OPTIONS.iter().filter(counts);
    let option = found.find(|option| option.names.contains(&word.as_str()))?;
    let program = verb.map_or_else(|| "mica".to_owned(), |verb| format!("mica {verb}"));
    Some(format!("{program} has no {word}: {}", option.hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    fn said(words: &[&str]) -> Option<String> {
        let error = Cli::command().try_get_matches_from(words).expect_err("it is not understood");
        of(&error, crate::verb_named(words.iter().map(Into::into)).as_deref())
    }

    #[test]
    fn options_of_the_peers_are_answered_by_verb() {
        let said = |words: &[&str]| said(words).expect("an answer");
        assert!(said(&["mica", "serve", "-t", "a.qcow2"]).ends_with("leave it out"));
        assert!(said(&["mica", "info", "-t", "none", "a.qcow2"]).contains("--cache"));
        let behind = said(&["mica", "--log-level", "debug", "serve", "-t", "a.qcow2"]);
        assert!(behind.starts_with("mica serve has no -t: it serves on"), "{behind}");
        assert!(
            said(&["mica", "serve", "--socket", "s"]).starts_with("mica serve has no --socket")
        );
    }

    #[test]
    fn options_that_a_verb_has_are_not_in_the_table() {
        let mut cli = Cli::command();
        cli.build();
        for option in OPTIONS.iter().filter(|option| !option.verb.is_empty()) {
            let verb = cli.find_subcommand(option.verb).expect("a verb");
            for name in option.names {
                let plain = name.trim_start_matches('-');
                let has = verb.get_arguments().any(|known| match name.starts_with("--") {
                    true => known.get_long() == Some(plain),
                    false => known.get_short() == plain.chars().next(),
                });
                assert!(!has, "mica {} has {name}", option.verb);
            }
        }
    }
}
