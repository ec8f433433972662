//! What qemu-img or other verbs have and a verb has not: who asks for it is told what to use.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// An option that qemu-img, qemu-nbd or another verb has.
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
    option(
        "serve",
        &["-t", "--persistent"],
        "it keeps serving when a client disconnects: leave it out",
    ),
    option("serve", &["-k", "--socket"], "use --nbd PATH"),
    option("serve", &["-p", "--port", "-b", "--bind"], "use --nbd tcp:HOST:PORT"),
    option("serve", &["-c", "--connect", "-d", "--disconnect"], KERNEL),
    option("serve", &["-v", "--verbose"], "use --log-level info"),
    option("serve", &["-L", "--list"], "nbdinfo --list shows the exports of a server"),
    option("serve", &["-n", "--nocache"], "use --cache none"),
    option("serve", &["-P"], "use --partition"),
    option("serve", &["--tls-creds"], "use --tls-certificates DIR"),
    option("resize", &["--preallocation"], "added space is not allocated: use qemu-img resize"),
    option(
        "commit",
        &["-r", "--rate"],
        "mica ctl commit --rate bounds a merge of a disk that is served",
    ),
    option(
        "read",
        &["--output"],
        "it prints the bytes of the disk; mica map --output json shows where they are",
    ),
    option("rebase", &["-c", "--compress"], "mica convert -c compresses a copy"),
    option("rebase", &["--backing-cache"], "use --cache for how images are read"),
    option("compare", &["--a-format"], "use --format"),
    option("compare", &["--b-format"], "use --second-format"),
    option("convert", &["--source-format"], "use --format"),
    option("convert", &["--source-image-opts"], IMAGE_OPTS),
    option("amend", &["-p", "--progress"], "it completes at once: leave it out"),
    option("map", &["-l", "--max-len"], "use --max-length"),
    option("check", &["-t"], "use --cache for how images are read"),
    option("", &["--image-opts"], IMAGE_OPTS),
    option("", &["--object"], "--secret FILE names the passphrase of encrypted images"),
    option("", &["--connect"], KERNEL),
    option("", &["--salvage"], "use qemu-img convert --salvage"),
    option("", &["--selinux-label"], "systemd labels sockets, and passes them to mica"),
    option("", &["--target-image-opts"], "name the target, and its format with -O"),
    option(
        "",
        &["--tls-authz"],
        "everyone with a certificate of the CA is admitted: use a separate CA for these clients",
    ),
    option("", &["-T"], "use --cache for how images are read"),
    option("", &["-t"], "use --cache for how images are read and written"),
    option("", &["-i"], "use --aio for how I/O is done"),
    option("", &["-C", "--copy-range-offloading"], "mica has no copy offloading: leave it out"),
];

const IMAGE_OPTS: &str = "name the image, and its format with --format";
const KERNEL: &str = "nbd-client connects the kernel to a server";

/// One line about a command line that means something to others only.
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
        assert!(behind.starts_with("mica serve has no -t: it keeps serving"), "{behind}");
        assert!(
            said(&["mica", "serve", "--socket", "s"]).starts_with("mica serve has no --socket")
        );
    }

    /// What `qemu-img VERB --help` lists, of QEMU 10.0: the options of each verb that both have,
    /// with a value for those that take one.
    const OF_QEMU_IMG: &[(&str, &str)] = &[
        ("amend", "-q --quiet -p --progress -f=qcow2 --image-opts -t=none --cache=none --force"),
        ("amend", "--format=qcow2 -o=compat=1.1 --object=secret,id=s,file=k"),
        ("bench", "-q --quiet -f=qcow2 --format=qcow2 --image-opts -t=none --cache=none -c=1"),
        ("bench", "--count=1 -s=4k --buffer-size=4k -d=1 --depth=1 -o=0 --offset=0 -S=4k"),
        ("bench", "--step-size=4k -i=threads --aio=threads -n --native -w --write --pattern=1"),
        ("bench", "--flush-interval=1 --no-drain -U --force-share"),
        ("bitmap", "-f=qcow2 --format=qcow2 --image-opts --add -g=64k --granularity=64k --remove"),
        ("bitmap", "--clear --enable --disable --merge=b -b=f --source-file=f -F=qcow2"),
        ("bitmap", "--source-format=qcow2 --object=secret,id=s,file=k"),
        ("check", "-q --quiet -f=qcow2 --format=qcow2 --image-opts -T=none --cache=none -U"),
        ("check", "--force-share --output=json -r=leaks --repair=all --object=secret,id=s,file=k"),
        ("commit", "-q --quiet -p --progress -f=qcow2 --format=qcow2 --image-opts -t=none -d"),
        ("commit", "--cache=none --drop -b=f --base=f -r=1M --rate=1M --object=secret,id=s"),
        ("compare", "-q --quiet -p --progress -f=raw --a-format=raw -F=raw --b-format=raw -s"),
        ("compare", "--image-opts --strict -T=none --cache=none -U --force-share --object=s"),
        ("convert", "-q --quiet -p --progress -f=raw --source-format=raw --source-image-opts"),
        ("convert", "--image-opts -l=x --source-snapshot=x -T=none --source-cache=none -O=raw"),
        ("convert", "--target-format=raw --target-image-opts -o=compat=1.1 -c --compress -t=none"),
        ("convert", "--target-options=compat=1.1 --target-cache=none -B=f --backing=f -F=raw"),
        ("convert", "--backing-format=raw -n --no-create --target-is-zero -S=4k --sparse-size=4k"),
        ("convert", "--bitmaps --skip-broken-bitmaps -U --force-share -r=1M --rate=1M -m=2"),
        ("convert", "--parallel=2 -C --copy-range-offloading --salvage -W --oob-writes --object=s"),
        ("create", "-q --quiet -f=qcow2 --format=qcow2 -o=compat=1.1 --options=compat=1.1 -b=f"),
        ("create", "--backing=f -F=raw --backing-format=raw -u --backing-unsafe --object=s"),
        ("dd", "-f=raw --format=raw --image-opts -O=raw --output-format=raw -U --force-share"),
        ("info", "-f=raw --format=raw --image-opts -b --backing-chain -U --force-share --object=s"),
        ("info", "--output=json"),
        ("map", "-f=raw --format=raw --image-opts --start-offset=0 --max-length=1 --output=json"),
        ("map", "-s=0 -l=1 -U --force-share --object=s"),
        ("measure", "-O=raw --target-format=raw -s=1M --size=1M -f=raw --format=raw --image-opts"),
        ("measure", "-l=x --snapshot=x --output=json -U --force-share --object=s -o=compat=1.1"),
        ("snapshot", "-q --quiet -f=raw --format=raw --image-opts -U --force-share --object=s"),
        ("snapshot", "-l --list -c=x --create=x -a=x --apply=x -d=x --delete=x"),
        (
            "rebase",
            "-q --quiet -p --progress -f=raw --format=raw --image-opts -t=none --cache=none",
        ),
        ("rebase", "-b=f --backing=f -F=raw --backing-format=raw -T=none --backing-cache=none -u"),
        ("rebase", "--backing-unsafe -c --compress -U --force-share --object=s"),
        ("resize", "-q --quiet -f=raw --format=raw --image-opts --shrink --preallocation=off"),
        ("resize", "--object=s"),
    ];

    #[test]
    fn whatever_qemu_img_takes_is_taken_or_answered() {
        let mut unanswered = Vec::new();
        for (verb, options) in OF_QEMU_IMG {
            for option in options.split(' ') {
                let (name, value) = option.split_once('=').unzip();
                let words = ["mica", verb, name.unwrap_or(option)].into_iter().chain(value);
                let words: Vec<_> = words.collect();
                // What is missing behind it does not matter here.
                let Err(error) = Cli::command().try_get_matches_from(&words) else { continue };
                let is_unknown = error.kind() == ErrorKind::UnknownArgument;
                if is_unknown && of(&error, Some(verb)).is_none() {
                    unanswered.push(words.join(" "));
                }
            }
        }
        assert!(unanswered.is_empty(), "{unanswered:#?}");
        let twice = ["mica", "check", "-r", "leaks", "-r", "all", "f"];
        assert!(Cli::command().try_get_matches_from(twice).is_ok(), "the last counts");
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
