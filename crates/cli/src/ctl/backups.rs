//! `mica ctl backup`: states of a chain that is served are kept, and exported for a backup.

use super::merges::{HowArgs, file_of_state, one};
use super::text;
use crate::client::{Client, nothing, of_disk};
use crate::commit::GoneArgs;
use crate::failure::Failure;
use crate::output::human_size;
use crate::sections;
use crate::table::table;
use clap::{Args, Subcommand};
use mica_daemon::NbdPlace;
use serde_json::{Value, json};

#[derive(Subcommand)]
pub(super) enum BackupVerb {
    /// Keep the current state of a disk, and export it for a backup.
    ///
    /// Guests continue to write. The state becomes a layer: DISK@STATE.qcow2 beside the image,
    /// which keeps its name, mode, group and access control list. It is a new file, and belongs to
    /// the server's user, who has to be in that group. With --since, the export has the context
    /// qemu:dirty-bitmap:STATE, which says what has changed since then. If the server or the reader
    /// is killed, the same command exports the same state again.
    ///
    /// While layers are merged no new state can be kept, as it is a layer; one that is kept already
    /// is exported unless the merge changes a layer that it has. A merge that would change one is
    /// refused while the state is exported.
    #[command(after_long_help = sections::CTL_BACKUP_BEGIN)]
    Begin(BeginArgs),
    /// End a backup: its state is kept, but no longer exported.
    #[command(after_long_help = sections::CTL_BACKUP_END)]
    End {
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Drop a kept state: its layer is merged, and its file removed.
    ///
    /// Guests continue to write. The newest state is merged into the active layer, any other into
    /// the next state, whose content does not change. Afterwards changes since the dropped state
    /// can no longer be determined. Copies made by `mica backup` stay. Refused if another image is
    /// based on the state: one in the folder of the disk, or anywhere else if mica put it there.
    /// The file is not removed while another process has it open; the answer says what became of
    /// it.
    #[command(after_long_help = sections::CTL_BACKUP_DROP)]
    Drop(DropArgs),
    /// Keep only the newest states, and drop the others one by one.
    ///
    /// Drops them as `mica ctl backup drop` does, newest first. If this is killed, the same command
    /// does the rest.
    #[command(after_long_help = sections::CTL_BACKUP_PRUNE)]
    Prune(PruneArgs),
    /// List the kept states of a disk, oldest first.
    #[command(after_long_help = sections::CTL_BACKUP_LIST)]
    List {
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
    },
}

// What is begun. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct BeginArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
    /// Name of the state from now on.
    #[arg(long = "as", value_name = "STATE")]
    state: String,
    /// A kept state: also export what has changed since then.
    #[arg(long, value_name = "STATE")]
    since: Option<String>,
    /// Where to export it: unix:PATH or tcp:HOST:PORT.
    ///
    /// TCP needs TLS as the disk itself does, and a port that the server was started with, or
    /// --sandbox off. The export has the name of the disk's own export.
    #[arg(long, value_name = "SOCKET")]
    nbd: NbdPlace,
}

// What is dropped. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct DropArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
    /// The state.
    #[arg(value_name = "STATE")]
    state: String,
    #[command(flatten)]
    gone: GoneArgs,
    #[command(flatten)]
    how: HowArgs,
}

// What is pruned. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct PruneArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
    /// How many states to keep: at least the newest, on which the next backup is based.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    keep: u32,
    #[command(flatten)]
    gone: GoneArgs,
    /// Limit copying to this many bytes per second.
    #[arg(long, value_name = "SIZE")]
    rate: Option<String>,
}

impl PruneArgs {
    fn run(&self, client: &Client) -> Result<Value, Failure> {
        let how = HowArgs::waiting(self.rate.clone());
        let listed = client.get(&of_disk(&self.disk, "backups"))?;
        let states = listed["states"].as_array().cloned().unwrap_or_default();
        let stay = usize::try_from(self.keep).unwrap_or(usize::MAX);
        let mut dropped = Vec::new();
        let mut copied = 0;
        let mut staying = Vec::new();
        // Each takes what is beneath with it only once.
        for state in states.iter().rev().skip(stay).map(|state| &state["state"]) {
            let mut body = json!({ "state": state, "rate": how.rate()? });
            self.gone.tell(&mut body);
            let job = how.start(client, &of_disk(&self.disk, "drop-state"), &body);
            let job = job.map_err(|failure| after(&dropped, failure))?;
            copied += job["copied_bytes"].as_u64().unwrap_or(0);
            dropped.push(state.clone());
            staying.extend(Some(&job["file"]).filter(|file| file["removed"] == false).cloned());
        }
        dropped.reverse();
        Ok(json!({
            "disk": self.disk,
            "dropped": dropped,
            "copied_bytes": copied,
            "files_that_stay": staying,
        }))
    }
}

/// Why no more states were dropped, and which were.
fn after(dropped: &[Value], failure: Failure) -> Failure {
    if dropped.is_empty() {
        return failure;
    }
    let names: Vec<_> = dropped.iter().rev().map(text).collect();
    Failure::new(format!("{}; dropped before that: {}", failure.message(), names.join(", ")))
}

fn pruned(answer: &Value) -> String {
    let dropped: Vec<_> = answer["dropped"].as_array().into_iter().flatten().map(text).collect();
    let disk = text(&answer["disk"]);
    match dropped.len() {
        0 => format!("{disk}: nothing to drop\n"),
        _ => {
            let copied = human_size(answer["copied_bytes"].as_u64().unwrap_or(0));
            let files = answer["files_that_stay"].as_array().into_iter().flatten();
            let files: String =
                files.filter_map(file_of_state).map(|told| format!("{disk}: {told}\n")).collect();
            format!("{disk}: dropped {}; {copied} copied\n{files}", dropped.join(", "))
        }
    }
}

impl DropArgs {
    fn run(&self, client: &Client) -> Result<Value, Failure> {
        let mut body = json!({ "state": self.state, "rate": self.how.rate()? });
        self.gone.tell(&mut body);
        self.how.start(client, &of_disk(&self.disk, "drop-state"), &body)
    }
}

impl BackupVerb {
    pub(super) fn run(&self, client: &Client) -> Result<(Value, super::Human), Failure> {
        Ok(match self {
            Self::Begin(args) => (args.run(client)?, begun),
            Self::End { disk } => (client.post(&of_disk(disk, "end-backup"), &nothing())?, ended),
            Self::Drop(args) => (args.run(client)?, one),
            Self::Prune(args) => (args.run(client)?, pruned),
            Self::List { disk } => (client.get(&of_disk(disk, "backups"))?, listed),
        })
    }
}

impl BeginArgs {
    fn run(&self, client: &Client) -> Result<Value, Failure> {
        // The server has a working directory of its own.
        let here = std::env::current_dir().map_err(Failure::from)?;
        let nbd = self.nbd.resolved(&here);
        let body = json!({ "as": self.state, "since": self.since, "nbd": nbd });
        client.post(&of_disk(&self.disk, "backup"), &body)
    }
}

fn begun(answer: &Value) -> String {
    let [disk, state, nbd, export] =
        ["disk", "state", "nbd", "export_name"].map(|key| text(&answer[key]));
    let how = match answer["resumed"] == true {
        true => "was kept before, and is",
        false => "is kept, and",
    };
    let since = match &answer["since"] {
        Value::Null => String::new(),
        since => format!(", with what has changed since {}", text(since)),
    };
    format!("{disk}: {state} {how} exported at {nbd} as {export}{since}\n")
}

fn ended(answer: &Value) -> String {
    let [disk, state, file] = ["disk", "state", "file"].map(|key| text(&answer[key]));
    format!("{disk}: the backup {state} has ended; its state is kept in {file}\n")
}

fn listed(answer: &Value) -> String {
    let states = answer["states"].as_array().into_iter().flatten();
    let rows = states.map(|state| {
        let at = match state["exported"] == true {
            true => text(&answer["backup"]["nbd"]),
            false => "-".to_owned(),
        };
        vec![text(&state["state"]), text(&state["layer"]), text(&state["file"]), at]
    });
    table(&["STATE", "LAYER", "FILE", "EXPORTED AT"], &[1], rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backups_are_told_in_a_line() {
        let mut answer = json!({"disk": "web", "state": "tue", "since": "mon", "nbd": "/run/b",
            "export_name": "web", "file": "/vm/web@tue.qcow2", "resumed": false});
        assert_eq!(
            begun(&answer),
            "web: tue is kept, and exported at /run/b as web, with what has changed since mon\n"
        );
        answer["resumed"] = true.into();
        answer["since"] = Value::Null;
        assert_eq!(begun(&answer), "web: tue was kept before, and is exported at /run/b as web\n");
        assert_eq!(
            ended(&answer),
            "web: the backup tue has ended; its state is kept in /vm/web@tue.qcow2\n"
        );
    }

    #[test]
    fn states_that_were_dropped_are_told_in_a_line() {
        let mut answer = json!({"disk": "web", "dropped": ["mon", "tue"], "copied_bytes": 65536});
        assert_eq!(pruned(&answer), "web: dropped mon, tue; 64 KiB copied\n");
        let file = json!({"path": "/a", "removed": false, "reason": "/b stands on it"});
        answer["files_that_stay"] = json!([file]);
        assert!(pruned(&answer).ends_with("copied\nweb: /a stays: /b stands on it\n"));
        answer["dropped"] = json!([]);
        assert_eq!(pruned(&answer), "web: nothing to drop\n");
    }

    #[test]
    fn states_are_listed_with_their_files() {
        let answer = json!({"backup": {"nbd": "/run/b"}, "states": [
            {"state": "mon", "layer": 1, "file": "/vm/web@mon.qcow2", "exported": false},
            {"state": "tue", "layer": 2, "file": "/vm/web@tue.qcow2", "exported": true},
        ]});
        assert_eq!(
            listed(&answer),
            "STATE  LAYER  FILE               EXPORTED AT\n\
             mon        1  /vm/web@mon.qcow2  -\n\
             tue        2  /vm/web@tue.qcow2  /run/b\n"
        );
    }
}
