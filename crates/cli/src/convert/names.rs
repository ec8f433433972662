//! What is copied and where to: names between which options may stand, the last one of which is the
//! target.

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use std::path::PathBuf;

/// The names of a command line.
#[derive(Clone, Default)]
pub(crate) struct Names {
    pub(crate) sources: Vec<PathBuf>,
    pub(crate) target: PathBuf,
}

const FILES: &str = "files";

const HELP: &str = "The disks to copy, and the image, last";

const LONG_HELP: &str = "\
The disks to copy, for a chain its active layer, and the image, last.

A source may be standard input (-) with --format raw, which goes through a temporary file, or an \
export of an NBD server: nbd://HOST:PORT/EXPORT, nbd+unix:///EXPORT?socket=PATH, or with TLS \
nbds://HOST:PORT/EXPORT?tls-certificates=DIR. The target is a new file, or with -O raw a block \
device that is not in use, or - for standard output. Of a longer device the rest is not written.";

impl Args for Names {
    fn augment_args(command: Command) -> Command {
        let names = Arg::new(FILES).value_name("SOURCE... TARGET").help(HELP).long_help(LONG_HELP);
        let names = names.value_parser(value_parser!(PathBuf)).action(ArgAction::Append);
        command.arg(names.num_args(1..).required(true))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Names {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let names = matches.get_many::<PathBuf>(FILES).unwrap_or_default();
        let mut sources: Vec<PathBuf> = names.cloned().collect();
        match sources.pop() {
            Some(target) if !sources.is_empty() => Ok(Self { sources, target }),
            _ => {
                let what = "TARGET is missing: mica convert [OPTIONS] SOURCE... TARGET\n";
                Err(clap::Error::raw(ErrorKind::MissingRequiredArgument, what))
            }
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
