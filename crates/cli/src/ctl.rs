//! `mica ctl`: queries and controls a running server.

mod agent;
mod backups;
mod members;
mod merges;
mod saved;
mod snapshots;
mod stores;

use crate::client::{Client, ControlArgs, nothing, of_disk};
use crate::failure::Failure;
use crate::output::{OutputFormat, human_size, print, print_json};
use crate::plain::plain;
use crate::sections;
use crate::table::table;
use backups::BackupVerb;
use clap::{Args, Subcommand};
use members::{AddArgs, RemoveArgs};
use mica_daemon::LogLevel;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

/// Query and control a running server.
///
/// Through its control socket (`mica serve --control`).
#[derive(Args)]
// No blank line before the usage: so many verbs hardly fit a screen.
#[command(help_template = "{about-with-newline}{usage-heading} {usage}\n\n{all-args}{after-help}")]
pub(crate) struct CtlArgs {
    #[command(flatten)]
    control: ControlArgs,
    /// How to print the answer: human or json.
    #[arg(long, global = true, value_enum, default_value = "human", value_name = "FORMAT")]
    #[arg(hide_possible_values = true, hide_default_value = true)]
    output: OutputFormat,
    #[command(subcommand)]
    verb: CtlVerb,
}

#[derive(Subcommand)]
enum CtlVerb {
    /// Show which disks are served, from which image and where.
    #[command(after_long_help = sections::CTL_STATUS)]
    Status {
        /// The disk; by default all.
        #[arg(value_name = "DISK")]
        disk: Option<String>,
    },
    /// Show statistics since the start.
    #[command(after_long_help = sections::CTL_STATS)]
    Stats {
        /// Show what a volume holds, shares and owns alone, like mica volume stats.
        #[arg(long, requires = "disk")]
        space: bool,
        /// The disk; all by default.
        #[arg(value_name = "DISK")]
        disk: Option<String>,
    },
    /// Grow a disk while it is served.
    ///
    /// Its virtual machine is notified; NBD clients see the new length when they reconnect.
    #[command(after_long_help = sections::CTL_RESIZE)]
    Resize {
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
        /// The new length; with a leading +, the increase.
        #[arg(value_name = "[+]SIZE")]
        size: String,
    },
    /// Take a snapshot of a disk while it is served.
    ///
    /// Includes every write acknowledged so far; requests continue meanwhile. A snapshot of a chain
    /// is a new layer: from then on writes go to FILE, and the image that was written before stays
    /// as it is. A server that is started with the old image continues in FILE.
    #[command(after_long_help = sections::CTL_SNAPSHOT)]
    Snapshot(Box<snapshots::TakeArgs>),
    /// List the snapshots of a served volume.
    #[command(after_long_help = sections::CTL_SNAPSHOTS)]
    Snapshots(snapshots::ListArgs),
    /// Drop a snapshot of a served volume.
    #[command(after_long_help = sections::CTL_DROP)]
    Drop(snapshots::DropArgs),
    /// Relabel a snapshot of a served volume.
    #[command(after_long_help = sections::CTL_LABEL)]
    Label(snapshots::LabelArgs),
    /// Clone a served volume or one of its snapshots.
    ///
    /// The clone is in the same store, and nothing is copied. It includes every write acknowledged
    /// so far.
    #[command(after_long_help = sections::CTL_CLONE)]
    Clone(snapshots::CloneArgs),
    /// Show which parts of a served volume may differ from a snapshot.
    ///
    /// Compares their maps, without reading data.
    #[command(after_long_help = sections::CTL_DIFF)]
    Diff(snapshots::DiffArgs),
    /// Roll a drained volume back to a snapshot.
    ///
    /// Refused while the volume is served, because a guest would keep using what it has read
    /// before. Anything written since is lost, unless another snapshot has it; all snapshots stay.
    #[command(after_long_help = sections::CTL_ROLLBACK)]
    Rollback(snapshots::RollbackArgs),
    #[command(flatten)]
    InStore(stores::StoreVerb),
    /// Back up a disk while it is served: keep states, and export them.
    #[command(after_long_help = sections::CTL_BACKUP)]
    Backup {
        #[command(subcommand)]
        verb: BackupVerb,
    },
    /// Merge layers up into the active one while the disk is served.
    ///
    /// What the disk shows through the layers above --base is copied; these layers leave the chain,
    /// and their files stay as they are. Without --base the active layer needs no other afterwards.
    #[command(after_long_help = sections::CTL_STREAM)]
    Stream(merges::StreamArgs),
    /// Merge layers down into one beneath them while the disk is served.
    ///
    /// What the layers above --base own, up to --top, is copied into it, and they leave the chain.
    /// The active layer, which is the default for --top, stays and is empty afterwards. Refused if
    /// another disk or image needs one of these layers.
    #[command(after_long_help = sections::CTL_COMMIT)]
    Commit(merges::CommitArgs),
    /// Show running merges, and the last one of each disk.
    #[command(after_long_help = sections::CTL_JOBS)]
    Jobs {
        /// Also show earlier merges, oldest first: up to 32 per disk.
        #[arg(long)]
        all: bool,
    },
    /// Cancel a disk's merge: the chain keeps the layers that it has.
    #[command(after_long_help = sections::CTL_CANCEL)]
    Cancel {
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Pause a disk's merge.
    #[command(after_long_help = sections::CTL_PAUSE)]
    Pause {
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Resume a disk's merge.
    #[command(after_long_help = sections::CTL_RESUME)]
    Resume {
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Serve another disk.
    ///
    /// Either an image with options of `mica serve`, or the disks that a TOML file lists.
    #[command(after_long_help = sections::CTL_ADD)]
    Add(Box<AddArgs>),
    /// Stop serving disks, as drain does, and forget them.
    #[command(after_long_help = sections::CTL_REMOVE)]
    Remove(RemoveArgs),
    /// Stop serving a disk, or all, and close the images.
    ///
    /// Requests in flight complete, and everything is flushed. Without a name, all disks are closed
    /// and the server exits.
    #[command(after_long_help = sections::CTL_DRAIN)]
    Drain {
        /// The disk; all by default.
        #[arg(value_name = "DISK")]
        disk: Option<String>,
    },
    /// Hand a served volume over to another host, and close it here.
    ///
    /// Outstanding writes go into the store while requests continue; then requests end, as with
    /// drain. No other host can open the volume afterwards, except by force. If the store does not
    /// answer, the disk continues to be served here.
    #[command(after_long_help = sections::CTL_HANDOVER)]
    Handover {
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
        /// The name of the host, as `uname -n` prints it there.
        #[arg(long, value_name = "HOST")]
        to: String,
        /// Give up if the store has not taken all writes within this many seconds.
        #[arg(long, value_name = "SECONDS", default_value_t = 60)]
        limit: u32,
    },
    /// Serve a disk again.
    ///
    /// One that was drained, or that could not be served so far.
    #[command(after_long_help = sections::CTL_UNDRAIN)]
    Undrain {
        /// The disk.
        #[arg(value_name = "DISK")]
        disk: String,
    },
    /// Read the configuration file and certificates again.
    ///
    /// Adds the disks that are new in it, and removes those that it no longer has. A disk that
    /// cannot be served is shown as failed until it can. A disk whose settings have changed is left
    /// as it is and named in the answer, unless it is closed: failed or drained. New clients get
    /// the new certificates; existing connections continue.
    #[command(after_long_help = sections::CTL_RELOAD)]
    Reload,
    /// Show or set the log level of the server.
    #[command(after_long_help = sections::CTL_LOG_LEVEL)]
    LogLevel {
        /// The new level.
        #[arg(value_enum, value_name = "LEVEL")]
        level: Option<LogLevel>,
    },
}

pub(crate) fn run(args: &CtlArgs) -> Result<ExitCode, Failure> {
    let client = args.control.client();
    let (answer, human) = match ask(&client, &args.verb, args.output)? {
        Outcome::Answer(answer, human) => (answer, human),
        Outcome::Done(exit_code) => return Ok(exit_code),
    };
    match args.output {
        OutputFormat::Json => print_json(&answer)?,
        OutputFormat::Human => print(&human(&answer))?,
    }
    let is_refused = answer["refused"].as_array().is_some_and(|refused| !refused.is_empty())
        || certificates(&answer).any(|folder| !folder["error"].is_null());
    Ok(if is_refused { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Formats an answer for people.
type Human = fn(&Value) -> String;

/// How a verb ended.
enum Outcome {
    /// This is to be printed.
    Answer(Value, Human),
    /// Everything has been printed.
    Done(ExitCode),
}

fn ask(client: &Client, verb: &CtlVerb, output: OutputFormat) -> Result<Outcome, Failure> {
    let (answer, human): (Value, Human) = match verb {
        CtlVerb::InStore(verb) => return verb.run(client, output).map(Outcome::Done),
        CtlVerb::Stats { disk: Some(disk), space: true } => {
            return stores::space(client, disk, output).map(Outcome::Done);
        }
        CtlVerb::Status { disk } => (of_disks(client, "/v1/status", disk.as_deref())?, status),
        CtlVerb::Stats { disk, .. } => (of_disks(client, "/v1/stats", disk.as_deref())?, stats),
        CtlVerb::Resize { disk, size } => {
            (client.post(&of_disk(disk, "resize"), &json!({ "size": size }))?, resized)
        }
        CtlVerb::Snapshot(args) => (args.run(client.clone())?, snapshots::taken),
        CtlVerb::Snapshots(args) => (args.run(client)?, snapshots::listed),
        CtlVerb::Drop(args) => (args.run(client)?, snapshots::dropped),
        CtlVerb::Label(args) => (args.run(client)?, snapshots::labelled),
        CtlVerb::Clone(args) => (args.run(client)?, snapshots::cloned),
        CtlVerb::Diff(args) => (args.run(client)?, snapshots::differing),
        CtlVerb::Rollback(args) => (args.run(client)?, snapshots::rolled_back),
        CtlVerb::Backup { verb } => verb.run(client)?,
        CtlVerb::Stream(args) => (args.run(client)?, merges::one),
        CtlVerb::Commit(args) => (args.run(client)?, merges::one),
        CtlVerb::Jobs { all } => (merges::jobs(client, *all)?, merges::listed),
        CtlVerb::Cancel { disk } => (merges::change(client, disk, "cancel")?, merges::one),
        CtlVerb::Pause { disk } => (merges::change(client, disk, "pause")?, merges::one),
        CtlVerb::Resume { disk } => (merges::change(client, disk, "resume")?, merges::one),
        CtlVerb::Add(args) => (args.run(client)?, members),
        CtlVerb::Remove(args) => (args.run(client)?, members),
        CtlVerb::Undrain { disk } => (client.post(&of_disk(disk, "undrain"), &nothing())?, members),
        CtlVerb::Reload => (client.post("/v1/reload", &nothing())?, members),
        CtlVerb::Drain { disk: Some(disk) } => {
            (client.post(&of_disk(disk, "drain"), &nothing())?, drained)
        }
        CtlVerb::Drain { disk: None } => (client.post("/v1/drain", &nothing())?, drained),
        CtlVerb::Handover { disk, to, limit } => {
            let body = json!({ "host": to, "limit_seconds": limit });
            let client = client.clone().waiting_for(Duration::from_secs((*limit).into()));
            (client.post(&of_disk(disk, "handover"), &body)?, handed_over)
        }
        CtlVerb::LogLevel { level: None } => (client.get("/v1/log-level")?, log_level),
        CtlVerb::LogLevel { level: Some(level) } => {
            (client.put("/v1/log-level", &json!({ "level": level }))?, log_level)
        }
    };
    Ok(Outcome::Answer(answer, human))
}

/// What the server says of its disks, or of one.
fn of_disks(client: &Client, path: &str, disk: Option<&str>) -> Result<Value, Failure> {
    let mut answer = client.get(path)?;
    disk.map_or(Ok(()), |disk| only(&mut answer, disk))?;
    Ok(answer)
}

/// Reduces an answer to one disk.
fn only(answer: &mut Value, disk: &str) -> Result<(), Failure> {
    let disks = answer["disks"].as_array_mut().map(std::mem::take).unwrap_or_default();
    let names: Vec<_> = disks.iter().map(|found| text(&found["name"])).collect();
    let found = disks.into_iter().find(|found| found["name"] == disk);
    let found = found.ok_or_else(|| Failure::new(mica_daemon::no_disk(disk, &names)))?;
    answer["disks"] = json!([found]);
    Ok(())
}

/// The disks of an answer.
pub(crate) fn disks(answer: &Value) -> impl Iterator<Item = &Value> {
    answer["disks"].as_array().into_iter().flatten()
}

/// The folders of certificates in an answer.
fn certificates(answer: &Value) -> impl Iterator<Item = &Value> {
    answer["certificates"].as_array().into_iter().flatten()
}

/// A value as plain text; a missing one is a dash.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => plain(text),
        other => other.to_string(),
    }
}

/// The number of layers, and of those below the active one that are indexed.
pub(crate) fn depth(disk: &Value) -> String {
    match disk["indexed_layers"].as_u64() {
        _ if was_never_open(disk) => "-".to_owned(),
        Some(indexed) if disk["layers"].as_u64() > Some(1) => {
            format!("{} ({indexed} indexed)", text(&disk["layers"]))
        }
        _ => text(&disk["layers"]),
    }
}

/// Whether nothing is known of the disk's image yet: it could not be opened, for one.
fn was_never_open(disk: &Value) -> bool {
    disk["layers"].as_u64() == Some(0)
}

fn status(answer: &Value) -> String {
    let uptime = duration(answer["uptime_ms"].as_u64().unwrap_or(0) / 1000);
    let (version, pid) = (text(&answer["version"]), text(&answer["pid"]));
    let rows = disks(answer).map(|disk| {
        let nbd = disk["nbd"].as_array().into_iter().flatten().map(text);
        let others = ["vhost_user", "fuse"].map(|way| &disk[way]);
        let others = others.into_iter().filter(|way| !way.is_null()).map(text);
        let (size, is_read_only) = match was_never_open(disk) {
            true => ("-".to_owned(), false),
            false => (human_size(disk["length"].as_u64().unwrap_or(0)), disk["writable"] != true),
        };
        let writes = if is_read_only { ", read-only" } else { "" };
        vec![
            text(&disk["name"]),
            text(&disk["state"]),
            size,
            depth(disk),
            text(&disk["clients"]),
            format!("{} ({}{writes})", text(&disk["image"]), text(&disk["format"])),
            text(&disk["export_name"]),
            nbd.chain(others).collect::<Vec<_>>().join(" "),
        ]
    });
    let head = ["DISK", "STATE", "SIZE", "LAYERS", "CLIENTS", "IMAGE", "EXPORT", "SERVED AT"];
    let problems = disks(answer).flat_map(|disk| {
        let problems = [
            ("failure", ""),
            ("latch", "latched: "),
            ("device_error", "its device is broken: "),
            ("weakness", ""),
        ];
        problems
            .into_iter()
            .filter(|(key, _)| !disk[*key].is_null())
            .map(|(key, what)| format!("\n{}: {what}{}\n", text(&disk["name"]), text(&disk[key])))
    });
    let under_way = disks(answer).map(|disk| &disk["merge"]).filter(|it| it.is_object());
    let merges: Value = under_way.cloned().collect();
    let merges = match merges.as_array().is_some_and(|merges| merges.is_empty()) {
        true => String::new(),
        false => format!("\n{}", merges::listed(&merges)),
    };
    format!(
        "mica {version}, process {pid}, up {uptime}\n\n{}{}{}{}",
        table(&head, &[2, 4], rows.collect()),
        counts(answer),
        merges + &volumes(answer) + &stores(answer),
        problems.collect::<String>()
    )
}

/// How many disks are in which state, if they are more than a screen shows.
fn counts(answer: &Value) -> String {
    let mut counts = BTreeMap::new();
    for disk in disks(answer) {
        *counts.entry(text(&disk["state"])).or_insert(0_usize) += 1;
    }
    let all: usize = counts.values().sum();
    if all < COUNTED_FROM {
        return String::new();
    }
    let counts: Vec<_> = counts.iter().map(|(state, count)| format!("{count} {state}")).collect();
    format!("\n{all} disks: {}\n", counts.join(", "))
}

/// Disks that nobody counts by looking at them.
const COUNTED_FROM: usize = 20;

/// How the logs and the stores of volumes do.
fn volumes(answer: &Value) -> String {
    let rows = disks(answer).filter(|disk| disk["volume"].is_object()).map(|disk| {
        let volume = &disk["volume"];
        let number = |key: &str| volume[key].as_u64().unwrap_or(0);
        let log = match volume["log_bytes"].as_u64() {
            Some(bytes) => {
                format!("{} of {}", human_size(number("log_used_bytes")), human_size(bytes))
            }
            None => "-".to_owned(),
        };
        let store = match (number("fenced"), number("store_silent_seconds")) {
            (1.., _) => "taken over".to_owned(),
            (0, 0) => format!("{:.1} ms", thousandths(number("put_p50_us"))),
            (0, silent) => format!("silent for {silent} s"),
        };
        vec![
            text(&disk["name"]),
            log,
            human_size(number("pending_bytes")),
            format!("{} s", number("pending_seconds")),
            store,
            if number("throttled") > 0 { "yes" } else { "no" }.to_owned(),
            text(&volume["snapshots"]),
        ]
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = ["VOLUME", "LOG", "NOT STORED", "FOR", "STORE", "THROTTLED", "SNAPSHOTS"];
    format!("\n{}", table(&head, &[2, 3, 6], rows))
}

/// What was collected in the background.
fn stores(answer: &Value) -> String {
    let all = answer["stores"].as_array().into_iter().flatten();
    let rows: Vec<_> = all
        .map(|store| {
            let size = |key: &str| human_size(store[key].as_u64().unwrap_or(0));
            let result = match &store["gc_failure"] {
                Value::Null => "-".to_owned(),
                why => text(why),
            };
            vec![
                text(&store["store"]),
                size("bytes"),
                size("live_bytes"),
                text(&store["gc_passes"]),
                size("gc_freed_bytes"),
                size("gc_rewritten_bytes"),
                result,
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = ["STORE", "BYTES", "NEEDED", "COLLECTED", "FREED", "WRITTEN AGAIN", "FAILURE"];
    format!("\n{}", table(&head, &[1, 2, 3, 4, 5], rows))
}

#[expect(clippy::cast_precision_loss, reason = "one digit is shown")]
fn thousandths(count: u64) -> f64 {
    count as f64 / 1000.0
}

/// Every figure that is not zero.
fn stats(answer: &Value) -> String {
    let mut rows = Vec::new();
    for disk in disks(answer) {
        for section in ["map", "write", "volume", "nbd", "vhost_user", "fuse"] {
            for (name, value) in disk[section].as_object().into_iter().flatten() {
                if value.as_u64() == Some(0) {
                    continue;
                }
                rows.push(vec![text(&disk["name"]), format!("{section}.{name}"), text(value)]);
            }
        }
    }
    table(&["DISK", "FIGURE", "SINCE THE START"], &[2], rows)
}

fn resized(answer: &Value) -> String {
    let notice = match answer["notice"].as_str().unwrap_or_default() {
        "taken" => "; its virtual machine has seen it".to_owned(),
        "sent" => "; its virtual machine was notified".to_owned(),
        "nobody" => "; no virtual machine is connected".to_owned(),
        "none" => String::new(),
        failed => format!("; its virtual machine was not notified ({})", plain(failed)),
    };
    let [before, after] = ["length_before", "length"].map(|length| text(&answer[length]));
    format!("{}: {before} bytes before, {after} bytes now{notice}\n", text(&answer["disk"]))
}

fn drained(answer: &Value) -> String {
    let names = answer["drained"].as_array().into_iter().flatten().map(text);
    names.fold(String::new(), |text, name| text + &name + ": drained, its image is closed\n")
}

fn handed_over(answer: &Value) -> String {
    let [disk, host, pause] = ["disk", "handed_to", "pause_ms"].map(|key| text(&answer[key]));
    format!("{disk}: handed over to {host}; service was interrupted for {pause} ms\n")
}

/// Which disks came and went.
fn members(answer: &Value) -> String {
    let list = |key: &str| answer[key].as_array().into_iter().flatten();
    let mut said = String::new();
    for (key, what) in [
        ("added", "added and served"),
        ("removed", "removed, and its image closed"),
        ("undrained", "served again"),
    ] {
        list(key).for_each(|name| said += &format!("{}: {what}\n", text(name)));
    }
    for refused in list("refused") {
        let at = refused["at"].as_str().map(|at| format!("{at}: ")).unwrap_or_default();
        said += &format!("{at}{}: {}\n", text(&refused["disk"]), text(&refused["error"]));
    }
    for folder in certificates(answer) {
        let addresses = folder["addresses"].as_array().into_iter().flatten();
        let at = addresses.map(text).collect::<Vec<_>>().join(", ");
        said += &match &folder["error"] {
            Value::Null => {
                format!("certificates in {}: read again, for {at}\n", text(&folder["folder"]))
            }
            error => format!("clients at {at} still get the old certificates: {}\n", text(error)),
        };
    }
    list("notes").for_each(|note| said += &format!("{}\n", text(note)));
    if let Some(count) = answer["unchanged"].as_u64() {
        said += &format!("{count} unchanged\n");
    }
    if let Some(file) = answer["saved"].as_str() {
        said += &format!("saved in {}\n", plain(file));
    }
    said
}

fn log_level(answer: &Value) -> String {
    text(&answer["level"]) + "\n"
}

/// A duration in seconds, for people.
pub(crate) fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_is_shown_as_plain_text_in_columns() {
        let answer = json!({
            "version": "1", "pid": 7, "uptime_ms": 61_000,
            "disks": [
                {"name": "web1", "state": "serving", "length": 1 << 30, "layers": 12,
                 "indexed_layers": 11, "clients": 2, "image": "/a\u{1b}[31m", "format": "qcow2",
                 "writable": true, "nbd": ["/run/a"], "export_name": "w", "vhost_user": "/run/b", "fuse": null,
                 "device_error": "gone"},
                {"name": "d", "state": "drained", "length": 512, "layers": 1,
                 "indexed_layers": null, "clients": 0, "image": "b", "format": "raw",
                 "writable": false, "nbd": [], "vhost_user": null, "fuse": null},
                {"name": "e", "state": "failed", "length": 0, "layers": 0,
                 "indexed_layers": null, "clients": 0, "image": "c", "format": "qcow2",
                 "writable": false, "nbd": [], "vhost_user": null, "fuse": null,
                 "failure": "no such file"},
            ],
        });
        assert_eq!(
            status(&answer),
            "mica 1, process 7, up 1 min 1 s\n\n\
             DISK  STATE     SIZE  LAYERS           CLIENTS  IMAGE               EXPORT  SERVED AT\n\
             web1  serving  1 GiB  12 (11 indexed)        2  /a\u{fffd}[31m (qcow2)     w       \
             /run/a /run/b\n\
             d     drained  512 B  1                      0  b (raw, read-only)  -\n\
             e     failed       -  -                      0  c (qcow2)           -\n\
             \n\
             web1: its device is broken: gone\n\
             \ne: no such file\n"
        );
    }

    #[test]
    fn many_disks_are_counted_by_state() {
        let disks = |count: usize| {
            let state = |number| if number % 10 == 3 { "failed" } else { "serving" };
            let disks: Vec<_> = (0..count).map(|number| json!({"state": state(number)})).collect();
            counts(&json!({ "disks": disks }))
        };
        assert_eq!(disks(19), "");
        assert_eq!(disks(1000), "\n1000 disks: 100 failed, 900 serving\n");
    }

    #[test]
    fn volumes_are_shown_with_their_logs_and_stores() {
        let answer = json!({"disks": [
            {"name": "web", "volume": {"log_used_bytes": 5 << 20, "log_bytes": 1 << 30,
             "pending_bytes": 8192, "pending_seconds": 2, "put_p50_us": 2340, "snapshots": 12}},
            {"name": "db", "volume": {"store_silent_seconds": 61, "throttled": 1}},
            {"name": "old", "volume": {"fenced": 1}},
            {"name": "image", "volume": null},
        ]});
        assert_eq!(
            volumes(&answer),
            "\nVOLUME  LOG             NOT STORED  FOR  STORE            THROTTLED  SNAPSHOTS\n\
             web     5 MiB of 1 GiB       8 KiB  2 s  2.3 ms           no                12\n\
             db      -                      0 B  0 s  silent for 61 s  yes                -\n\
             old     -                      0 B  0 s  taken over       no                 -\n"
        );
        assert_eq!(volumes(&json!({"disks": [{"name": "image"}]})), "");
        let answer = json!({"stores": [{"store": "file:///s", "bytes": 3 << 20, "gc_passes": 2,
            "live_bytes": 1 << 20, "gc_freed_bytes": 4096, "gc_rewritten_bytes": 0,
            "gc_failure": null}]});
        assert_eq!(
            stores(&answer),
            "\nSTORE      BYTES  NEEDED  COLLECTED  FREED  WRITTEN AGAIN  FAILURE\n\
             file:///s  3 MiB   1 MiB          2  4 KiB            0 B  -\n"
        );
        assert_eq!(stores(&json!({})), "");
    }

    #[test]
    fn an_answer_that_lacks_things_is_shown_with_dashes() {
        assert!(status(&json!({"disks": [{}]})).contains('-'));
        assert_eq!(drained(&json!({})), "");
        assert!(stats(&json!({"disks": 3})).contains("FIGURE"));
    }

    #[test]
    fn times_are_said_as_people_say_them() {
        assert_eq!(duration(5), "5 s");
        assert_eq!(duration(3599), "59 min 59 s");
        assert_eq!(duration(3600), "1 h 0 min");
        assert_eq!(duration(90_000), "1 d 1 h");
    }
}
