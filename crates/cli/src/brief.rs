//! What `-h` shows: as much as a terminal of 24 lines has room for, and where the rest is.
//!
//! Options that few people need are left out where they are defined (`hide_short_help`). What
//! depends on the verb stands here: lists of many verbs become groups of names, and options that
//! all verbs for images have are left out where there are many others.

use clap::Command;
use clap::error::{Error, ErrorKind};
use std::ffi::OsString;

/// What verbs are for, and which they are.
type Groups = &'static [(&'static str, &'static [&'static str])];

const MICA: Groups = &[
    ("Serve disks", &["serve", "ctl", "top"]),
    ("Look at disks", &["info", "map", "check", "compare", "diff", "measure", "read"]),
    ("Make images", &["create", "clone", "convert", "dd"]),
    ("Change images", &["resize", "amend", "snapshot", "bitmap", "write"]),
    ("Change chains", &["commit", "rebase", "index"]),
    ("Back up", &["backup", "restore"]),
    ("Look at a fleet", &["tree", "survey"]),
    ("Manage volumes", &["volume"]),
    ("Measure and test", &["bench", "gen"]),
];

const CTL: Groups = &[
    ("Look at a server", &["status", "stats", "jobs", "log-level"]),
    ("Look at volumes", &["info", "tree", "diff", "check", "scrub", "gc"]),
    ("Disks come and go", &["add", "remove", "drain", "undrain", "handover", "reload"]),
    ("Change a disk", &["resize", "rollback"]),
    ("Snapshots", &["snapshot", "snapshots", "label", "drop", "clone"]),
    ("Backups", &["backup"]),
    ("Merges of layers", &["stream", "commit", "pause", "resume", "cancel"]),
];

const VOLUME: Groups = &[
    ("Make and delete", &["create", "import", "clone", "receive", "delete"]),
    ("Look at volumes", &["list", "info", "tree", "stats", "diff"]),
    ("Change a volume", &["rollback", "rekey", "handover"]),
    ("Snapshots", &["snapshot", "snapshots", "label", "drop", "keep"]),
    ("Copy elsewhere", &["export", "send"]),
    ("Maintain a store", &["check", "scrub", "gc", "log"]),
];

/// The verbs whose lists would not fit.
const GROUPED: [(&str, Groups); 3] = [("mica", MICA), ("mica ctl", CTL), ("mica volume", VOLUME)];

/// Options that are shown where there is room for them, by the verbs that have none.
const LEFT_OUT: [(&str, &[&str]); 6] = [
    ("mica serve", &[ALLOW_PATH, FORCE_SHARE]),
    ("mica ctl add", &[ALLOW_PATH, FORCE_SHARE]),
    ("mica convert", &[ALLOW_PATH, FORCE_SHARE, "quiet"]),
    ("mica bitmap", &[ALLOW_PATH, FORCE_SHARE]),
    ("mica backup", &[ALLOW_PATH, FORCE_SHARE, "format", "quiet", "output"]),
    ("mica bench", &[ALLOW_PATH, FORCE_SHARE]),
];
const ALLOW_PATH: &str = "allow_path";
const FORCE_SHARE: &str = "force_share";

/// Whether `error` is a screen of help that the command line with these `words` asks for, or gets
/// because it names no verb.
pub(crate) fn is_screen(error: &Error, mut words: impl Iterator<Item = OsString>) -> bool {
    let is_help = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    );
    is_help && !words.any(|word| word == "--help" || word == "help")
}

/// The definitions of all verbs, which are built, for a screen of help.
pub(crate) fn screens(whole: Command) -> Command {
    let name = whole.get_bin_name().unwrap_or_else(|| whole.get_name()).to_owned();
    let command = whole.mut_subcommands(|verb| match verb.get_name() {
        "help" => verb.hide(true),
        _ => screens(verb),
    });
    let left_out = LEFT_OUT.iter().find(|(verb, _)| *verb == name);
    let left_out = left_out.map_or(&[][..], |(_, options)| options);
    // Headings are for long lists.
    let command = command.mut_args(|option| option.help_heading(None));
    let command = command.mut_args(|option| match option.get_id().as_str() {
        "help" => option.help("Print this help"),
        id if left_out.contains(&id) => option.hide_short_help(true),
        _ => option,
    });
    match GROUPED.iter().find(|(verb, _)| *verb == name) {
        Some((_, groups)) => {
            let command = command.help_template(template(groups));
            command.after_help(format!(
                "What each does: {name} --help; its options: {name} COMMAND -h"
            ))
        }
        None => command.after_help(format!("All options, with examples: {name} --help")),
    }
}

/// Help with the names of verbs in `groups`.
fn template(groups: Groups) -> String {
    let lines: String = groups
        .iter()
        .map(|(title, verbs)| format!("  {title:<19}{}\n", verbs.join(", ")))
        .collect();
    format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\nCommands:\n{lines}\nOptions:\n\
         {{options}}{{after-help}}"
    )
}

#[cfg(test)]
mod tests {
    use super::{GROUPED, screens};
    use crate::args::Cli;
    use clap::CommandFactory;

    #[test]
    fn every_verb_that_help_lists_is_in_one_group() {
        let mut whole = Cli::command();
        whole.build();
        for (name, groups) in GROUPED {
            let verb = name
                .split(' ')
                .skip(1)
                .fold(&whole, |verb, word| verb.find_subcommand(word).expect("a verb"));
            let verbs = verb.get_subcommands().filter(|verb| !verb.is_hide_set());
            let mut verbs: Vec<_> =
                verbs.map(|verb| verb.get_name()).filter(|name| *name != "help").collect();
            let mut grouped: Vec<_> =
                groups.iter().flat_map(|(_, verbs)| verbs.iter().copied()).collect();
            verbs.sort_unstable();
            grouped.sort_unstable();
            assert_eq!(grouped, verbs, "{name}");
        }
    }

    #[test]
    fn screens_of_all_verbs_are_made_of_valid_definitions() {
        let mut whole = Cli::command();
        whole.build();
        screens(whole).debug_assert();
    }
}
