//! The command line: one file per verb.
//!
//! A verb parses, calls the crates below, and prints. Errors go to stderr as one line that says
//! what, where and, if possible, what to do; the exit code is the verb's.

mod amend;
mod args;
mod backup;
mod bench;
mod bitmap;
mod brief;
mod calendar;
mod captive;
mod check;
mod client;
mod clone;
mod commit;
mod compare;
mod convert;
mod counterparts;
mod create;
mod ctl;
mod cursor;
mod dd;
mod diff;
mod ending;
mod failure;
mod folders;
mod fork;
mod generate;
mod images;
mod index;
mod info;
mod log;
mod manual;
mod map;
mod measure;
mod merging;
mod output;
mod pid_file;
mod pipe;
mod plain;
mod rebase;
mod resize;
mod restore;
mod sections;
mod serve;
mod snapshot;
mod survey;
mod svg;
mod table;
mod top;
mod tree;
mod unfinished;
mod volume;

use args::{Cli, Verb};
use clap::error::{ContextKind, ContextValue};
use clap::{Command, CommandFactory, FromArgMatches};
use failure::Failure;
use mica_stack::Format;
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    if let Some(help) = options_help() {
        return output::print(&help).map_or_else(Failure::report, |()| ExitCode::SUCCESS);
    }
    let cli = match parse() {
        Ok(cli) => cli,
        Err(error) => return told(&error),
    };
    let log = log::start(cli.log_level);
    // A file that may not grow is an error to report, not a signal to die from. If the handler is
    // refused, so is every other.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    if !matches!(cli.verb, Verb::Serve(_) | Verb::Helper) {
        // Whoever asks how far a verb is must not kill it; those that can tell do.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGUSR1, Arc::default());
    }
    let outcome = match cli.verb {
        Verb::Serve(args) => serve::run(*args, &log),
        Verb::Ctl(args) => ctl::run(&args),
        Verb::Top(args) => top::run(&args),
        Verb::Info(args) => info::run(&args),
        Verb::Map(args) => map::run(&args),
        Verb::Check(args) => check::run(&args),
        Verb::Compare(args) => compare::run(&args),
        Verb::Diff(args) => diff::run(&args),
        Verb::Create(args) => create::run(&args),
        Verb::Clone(args) => clone::run(&args),
        Verb::Snapshot(args) => snapshot::run(&args),
        Verb::Convert(args) => convert::run(&args),
        Verb::Dd(args) => dd::run(&args),
        Verb::Commit(args) => commit::run(&args),
        Verb::Rebase(args) => rebase::run(&args),
        Verb::Resize(args) => resize::run(&args),
        Verb::Amend(args) => amend::run(&args),
        Verb::Bitmap(args) => bitmap::run(&args),
        Verb::Backup(args) => backup::run(&args),
        Verb::Restore(args) => restore::run(&args),
        Verb::Measure(args) => measure::run(&args),
        Verb::Read(args) => pipe::read(&args),
        Verb::Write(args) => pipe::write(&args),
        Verb::Bench(args) => bench::run(&args),
        Verb::Index(args) => index::run(&args),
        Verb::Volume(args) => volume::run(&args),
        Verb::Survey(args) => survey::run(&args),
        Verb::Tree(args) => tree::run(&args),
        Verb::Gen(args) => generate::run(&args),
        Verb::Manual(args) => manual::run(&args, Cli::command()),
        Verb::Helper => serve::run_helper(),
    };
    unfinished::wait_if_ending();
    outcome.unwrap_or_else(|failure: Failure| failure.report())
}

/// Prints help that was asked for, or what is wrong with the command line.
fn told(error: &clap::Error) -> ExitCode {
    let verb = verb_named(std::env::args_os());
    let printed = match counterparts::of(error, verb.as_deref()).or_else(|| misread(error)) {
        Some(line) => {
            failure::tell(&format!("mica: {line}"));
            Ok(())
        }
        None => error.print().and_then(|()| io::stdout().flush()),
    };
    if error.use_stderr() {
        // If that cannot be written, it cannot be reported.
        return ExitCode::from(usage_code(verb.as_deref()));
    }
    match printed {
        // Who reads the first lines of a help has read it.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Failure::of_stdout(error).report()
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Why an option does not take a value, in one line as all errors are, if it is one of mica's own:
/// these name the value themselves.
fn misread(error: &clap::Error) -> Option<String> {
    let why = std::error::Error::source(error)?.downcast_ref::<mica_block::Error>()?;
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let option = option.split(' ').next().unwrap_or_default();
    Some(plain::plain(&format!("{option}: {}", why.in_one_line())))
}

/// What the command line says.
fn parse() -> Result<Cli, clap::Error> {
    let mut command = command_for(std::env::args_os().nth(1));
    let mut matches = command.try_get_matches_from_mut(std::env::args_os()).map_err(|error| {
        match brief::is_screen(&error, std::env::args_os()) {
            true => screen().unwrap_or(error),
            false => error,
        }
    })?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// The screen of help that the command line asks for.
fn screen() -> Option<clap::Error> {
    let screens = brief::screens(whole_command());
    screens.try_get_matches_from(std::env::args_os()).err()
}

/// What is to be known for a command line with this `first` word: the verb that it names, none for
/// the version, or all, for a list of them, say.
fn command_for(first: Option<OsString>) -> Command {
    let command = Cli::command();
    let is_enough = |word: OsString| {
        word == "--version" || word == "-V" || command.find_subcommand(word).is_some()
    };
    match first.is_some_and(is_enough) {
        true => command,
        false => whole_command(),
    }
}

/// The definitions of all verbs, each with its options.
fn whole_command() -> Command {
    let mut command = Cli::command();
    command.build();
    command
}

/// The verb in the `words` of a command line that is perhaps not understood.
fn verb_named(words: impl IntoIterator<Item = OsString>) -> Option<String> {
    let verbs = Cli::command();
    let mut words = words.into_iter().skip(1);
    words.find_map(|word| verbs.find_subcommand(word)).map(|verb| verb.get_name().to_owned())
}

/// The exit code for a command line of `verb` that is not understood: 1, unless that is a verdict
/// of it.
fn usage_code(verb: Option<&str>) -> u8 {
    match verb {
        Some("compare") => compare::EXIT_FAILED,
        _ => 1,
    }
}

/// What -o help asks for, also where an image is still to be named.
fn options_help() -> Option<String> {
    if !std::env::args_os().any(|word| [b"help", &b"?"[..]].iter().any(|end| ends(&word, end))) {
        return None;
    }
    let matches = Cli::command().ignore_errors(true).try_get_matches().ok()?;
    let (verb, matches) = match matches.subcommand()? {
        ("volume", matches) => matches.subcommand()?,
        verb => verb,
    };
    let format = match verb {
        "amend" => {
            let options: Vec<String> = matches.get_many("options")?.cloned().collect();
            return amend::options_help(&options);
        }
        "create" => matches.get_one::<Format>("format").copied().unwrap_or_default(),
        "convert" | "measure" | "export" => {
            let named = matches.get_one::<String>("output_format");
            named.map_or("qcow2", String::as_str).parse().ok()?
        }
        _ => return None,
    };
    let options: Vec<String> = matches.get_many("options")?.cloned().collect();
    create::options_help(&options, format)
}

fn ends(word: &std::ffi::OsStr, end: &[u8]) -> bool {
    std::os::unix::ffi::OsStrExt::as_bytes(word).ends_with(end)
}
