//! One man page.

use crate::calendar::utc;
use crate::failure::Failure;
use crate::sections::{ENVIRONMENT, EXIT_STATUS, FILES, Influence, peers};
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::time::{SystemTime, UNIX_EPOCH};

/// Sections that are shown as they are written.
const VERBATIM: [&str; 3] = ["EXAMPLES", "CONFIGURATION", "STORES"];

/// The page of a verb.
pub(super) struct Page<'a> {
    /// Built, so that it has the options of the verbs above it.
    pub(super) command: &'a Command,
    pub(super) above: Option<&'a Command>,
}

impl Page<'_> {
    pub(super) fn file_name(&self) -> String {
        format!("{}.1", name(self.command))
    }

    /// The page in roff.
    pub(super) fn render(&self) -> Result<Vec<u8>, Failure> {
        let man = Man::new(self.plain_command());
        let man = man
            .title(name(self.command).to_uppercase())
            .date(date())
            .source(source())
            .manual("mica");
        let mut page = Vec::new();
        man.render_title(&mut page)?;
        man.render_name_section(&mut page)?;
        man.render_synopsis_section(&mut page)?;
        man.render_description_section(&mut page)?;
        let mut options = Vec::new();
        man.render_options_section(&mut options)?;
        page.extend(as_paragraphs(&String::from_utf8_lossy(&options)).bytes());
        if self.command.get_subcommands().any(|verb| !verb.is_hide_set()) {
            man.render_subcommands_section(&mut page)?;
        }
        self.sections().to_writer(&mut page)?;
        Ok(page)
    }

    /// The command as the page shows it: its name and what it does on one line, as indexes of pages
    /// have it, its usage as `--help` has it, and every option with all of its help.
    fn plain_command(&self) -> Command {
        let mut command = self.command.clone();
        let usage = command.render_usage().to_string();
        let usage = usage.trim_start_matches("Usage: ").to_owned();
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let description =
            command.get_long_about().map_or_else(|| sentence(&about), ToString::to_string);
        command
            .override_usage(usage)
            .subcommand_help_heading("COMMANDS")
            .about(uncapitalized(&about))
            .long_about(description)
            .mut_args(|option| {
                let help = option.get_long_help().or_else(|| option.get_help());
                let help = sentence(&help.map(ToString::to_string).unwrap_or_default());
                option.hide_short_help(false).long_help(help)
            })
    }

    /// What comes after the options.
    fn sections(&self) -> Roff {
        let mut roff = Roff::new();
        let ending = self.command.get_after_long_help().map(ToString::to_string);
        let ending = ending.unwrap_or_default();
        let generic = if ending.contains("EXIT STATUS:") { "" } else { EXIT_STATUS };
        for section in ending.split("\n\n").chain([generic]) {
            let Some((heading, body)) = section.split_once(":\n") else { continue };
            roff.control("SH", [heading]);
            match VERBATIM.contains(&heading) {
                true => verbatim(&mut roff, body),
                false => list(&mut roff, body),
            }
        }
        self.influences(&mut roff, "ENVIRONMENT", ENVIRONMENT);
        self.influences(&mut roff, "FILES", FILES);
        roff.control("SH", ["SEE ALSO"]);
        roff.text([roman(self.see_also().join(", "))]);
        roff
    }

    fn influences(&self, roff: &mut Roff, heading: &str, all: &[Influence]) {
        let ours: Vec<_> = all.iter().filter(|one| one.counts_for(self.command)).collect();
        if ours.is_empty() {
            return;
        }
        roff.control("SH", [heading]);
        for Influence { name, what, .. } in ours {
            roff.control("TP", []);
            roff.text([bold(*name)]);
            roff.text([roman(*what)]);
        }
    }

    /// The page above and those below, and other programs.
    fn see_also(&self) -> Vec<String> {
        let below = self.command.get_subcommands().filter(|verb| !verb.is_hide_set());
        let ours = self.above.into_iter().chain(below);
        let ours = ours.map(|verb| format!("{}(1)", name(verb)));
        ours.chain(peers(name(self.command)).iter().map(|page| (*page).to_owned())).collect()
    }
}

/// `text`, which clap has taken the last full stop from.
fn sentence(text: &str) -> String {
    if text.ends_with(['.', ')']) { text.to_owned() } else { format!("{text}.") }
}

/// `text` as the rest of a line: no word that is a name begins what a verb does.
fn uncapitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().into_iter().flat_map(char::to_lowercase).chain(letters).collect()
}

/// The name of a verb's page.
fn name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn source() -> String {
    format!("mica {}", env!("CARGO_PKG_VERSION"))
}

/// Today, or the day that packagers set, so that the same source makes the same pages.
fn date() -> String {
    let told = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|seconds| seconds.parse().ok());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    utc(told.unwrap_or_else(now)).split(' ').next().unwrap_or_default().to_owned()
}

/// `roff` with paragraphs where it has empty lines.
fn as_paragraphs(roff: &str) -> String {
    roff.lines().flat_map(|line| [if line.is_empty() { ".IP" } else { line }, "\n"]).collect()
}

/// Lines as they are.
fn verbatim(roff: &mut Roff, body: &str) {
    roff.control("nf", []);
    for line in body.lines() {
        roff.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
    }
    roff.control("fi", []);
}

/// Lines of a word, two spaces or more, and what it means; others are paragraphs.
fn list(roff: &mut Roff, body: &str) {
    for line in body.lines().map(str::trim) {
        match line.split_once("  ") {
            Some((word, meaning)) => {
                roff.control("TP", []);
                roff.text([bold(word)]);
                roff.text([roman(meaning.trim())]);
            }
            None => {
                roff.control("PP", []);
                roff.text([roman(line)]);
            }
        }
    }
}
