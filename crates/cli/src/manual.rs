//! `mica manual`: man pages and completions for shells, made from the definitions that parse the
//! command line.
//!
//! The program writes them itself when it is packaged: they cannot be those of another version, and
//! building it needs no further step.

mod page;

use crate::failure::Failure;
use clap::{Args, Command};
use clap_complete::aot::{Bash, Fish, Generator, Zsh, generate};
use page::Page;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
pub(crate) struct ManualArgs {
    /// The directory, such as /usr/local/share: creates man, bash-completion, zsh and fish in it.
    #[arg(value_name = "DIRECTORY")]
    dir: PathBuf,
}

/// Writes what describes the program with the command line `cli`.
pub(crate) fn run(args: &ManualArgs, cli: Command) -> Result<ExitCode, Failure> {
    completions(&mut offered(&cli), &args.dir)?;
    // `mica help` is in the page of mica.
    let mut cli = cli.disable_help_subcommand(true);
    cli.build();
    pages(&cli, None, &args.dir.join("man/man1"))?;
    Ok(ExitCode::SUCCESS)
}

/// The page of `command`, and those of the verbs below it.
fn pages(command: &Command, above: Option<&Command>, dir: &Path) -> Result<(), Failure> {
    let page = Page { command, above };
    write(&dir.join(page.file_name()), &page.render()?)?;
    let below = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    below.into_iter().try_for_each(|verb| pages(verb, Some(command), dir))
}

/// The verbs that help shows: completions would offer the others, too.
fn offered(cli: &Command) -> Command {
    let verbs = cli.get_subcommands().filter(|verb| !verb.is_hide_set()).cloned();
    Command::new("mica")
        .version(env!("CARGO_PKG_VERSION"))
        .args(cli.get_arguments().cloned())
        .subcommands(verbs)
}

fn completions(cli: &mut Command, dir: &Path) -> Result<(), Failure> {
    complete(Bash, cli, &dir.join("bash-completion/completions/mica"))?;
    complete(Zsh, cli, &dir.join("zsh/site-functions/_mica"))?;
    complete(Fish, cli, &dir.join("fish/vendor_completions.d/mica.fish"))
}

fn complete(shell: impl Generator, cli: &mut Command, file: &Path) -> Result<(), Failure> {
    let mut script = Vec::new();
    generate(shell, cli, "mica", &mut script);
    write(file, &script)
}

fn write(file: &Path, content: &[u8]) -> Result<(), Failure> {
    let written = fs::create_dir_all(file.parent().unwrap_or(file));
    let written = written.and_then(|()| fs::write(file, content));
    written.map_err(|error| Failure::from(error).within(file.display()))
}
