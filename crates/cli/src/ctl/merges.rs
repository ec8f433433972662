//! `mica ctl stream`, `commit`, `jobs`, `cancel`, `pause` and `resume`: layers of a chain are
//! merged while it is served.

use super::{duration, text};
use crate::client::{Client, nothing, of_disk};
use crate::commit::GoneArgs;
use crate::failure::Failure;
use crate::images::size_of;
use crate::output::{human_size, progress_bar};
use crate::table::table;
use clap::Args;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often a server is asked how far a merge is.
const ASK_EVERY: Duration = Duration::from_millis(200);

// How a merge is done. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct HowArgs {
    /// Return at once; `mica ctl jobs` shows the progress.
    #[arg(long)]
    background: bool,
    /// Limit copying to this many bytes per second.
    #[arg(long, value_name = "SIZE")]
    rate: Option<String>,
}

// What is streamed. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct StreamArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
    /// The layer that stays beneath the active one; none by default.
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Also merge layers that keep states of backups; their files stay.
    #[arg(long)]
    drop_states: bool,
    #[command(flatten)]
    how: HowArgs,
}

// What is committed. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct CommitArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
    /// The uppermost layer to merge; the active one by default.
    #[arg(long, value_name = "FILE")]
    top: Option<PathBuf>,
    /// The layer to merge into; by default the one beneath.
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,
    #[command(flatten)]
    gone: GoneArgs,
    #[command(flatten)]
    how: HowArgs,
}

impl StreamArgs {
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let mut body = json!({ "rate": self.how.rate()?, "drop_states": self.drop_states });
        if let Some(base) = &self.base {
            body["base"] = named(base)?.into();
        }
        self.how.start(client, &of_disk(&self.disk, "stream"), &body)
    }
}

impl CommitArgs {
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let mut body = json!({ "rate": self.how.rate()? });
        self.gone.tell(&mut body);
        if let Some(top) = &self.top {
            body["top"] = named(top)?.into();
        }
        if let Some(base) = &self.base {
            body["base"] = named(base)?.into();
        }
        self.how.start(client, &of_disk(&self.disk, "commit"), &body)
    }
}

impl GoneArgs {
    /// Adds it to a request, if it is asked for: a server of before does not know it.
    pub(super) fn tell(&self, body: &mut Value) {
        if self.ignore_gone {
            body["ignore_gone"] = true.into();
        }
    }
}

impl HowArgs {
    /// One that waits for the end.
    pub(super) fn waiting(rate: Option<String>) -> Self {
        Self { background: false, rate }
    }

    pub(super) fn rate(&self) -> Result<u64, Failure> {
        self.rate.as_deref().map_or(Ok(0), |rate| size_of("--rate", rate))
    }

    /// Starts a merge and, unless it is to go on in the background, waits for its end.
    pub(super) fn start(
        &self,
        client: &Client,
        path: &str,
        body: &Value,
    ) -> Result<Value, Failure> {
        let answer = client.post(path, body)?;
        if self.background {
            return Ok(answer["job"].clone());
        }
        let job = follow(client, &answer["job"])?;
        match job["state"].as_str() {
            Some("failed") => Err(Failure::new(text(&job["failure"]))),
            Some("cancelled") => Err(Failure::new("the merge was cancelled")),
            _ => Ok(job),
        }
    }
}

/// Waits until `job` has ended, and shows how far it is.
fn follow(client: &Client, job: &Value) -> Result<Value, Failure> {
    let bar = progress_bar(job["total"].as_u64().unwrap_or(0), "");
    loop {
        let answer = client.get("/v1/jobs")?;
        let found = found_in(&answer, job);
        let found = found.ok_or_else(|| Failure::new("the server has no record of the merge"))?;
        bar.set_length(found["total"].as_u64().unwrap_or(0));
        bar.set_position(found["done"].as_u64().unwrap_or(0));
        if !matches!(found["state"].as_str(), Some("running" | "paused" | "cancelling")) {
            bar.finish_and_clear();
            return Ok(found.clone());
        }
        sleep();
    }
}

/// What `answer` says of this `job`, after whose end another one of the disk may have begun.
fn found_in<'a>(answer: &'a Value, job: &Value) -> Option<&'a Value> {
    let all = ["jobs", "past"].map(|key| answer[key].as_array());
    let mut all = all.into_iter().flatten().flatten();
    all.find(|found| ["disk", "number"].iter().all(|key| found[key] == job[key]))
}

#[expect(clippy::disallowed_methods, reason = "a thread that has no executor")]
fn sleep() {
    std::thread::sleep(ASK_EVERY);
}

/// How a server is told of a layer: by its path, or by the name that it has in the chain.
fn named(layer: &Path) -> Result<String, Failure> {
    let path = match layer.exists() {
        true => std::path::absolute(layer)?,
        false => layer.to_owned(),
    };
    path.into_os_string()
        .into_string()
        .map_err(|_| Failure::new(format!("{} is not UTF-8", layer.display())))
}

/// What is done with a merge that is under way.
pub(super) fn change(client: &Client, disk: &str, how: &str) -> Result<Value, Failure> {
    Ok(client.post(&of_disk(disk, how), &nothing())?["job"].clone())
}

/// The last merge of each disk; with those before, if `all` are wanted.
pub(super) fn jobs(client: &Client, all: bool) -> Result<Value, Failure> {
    let answer = client.get("/v1/jobs")?;
    let listed = |key: &str| answer[key].as_array().cloned().unwrap_or_default();
    let mut jobs = if all { listed("past") } else { Vec::new() };
    jobs.extend(listed("jobs"));
    Ok(jobs.into())
}

/// One merge, for people.
pub(super) fn one(job: &Value) -> String {
    let [disk, kind, state] = ["disk", "kind", "state"].map(|key| text(&job[key]));
    let copied = human_size(job["copied_bytes"].as_u64().unwrap_or(0));
    let layers = job["dropped"].as_array().map_or(0, Vec::len);
    let file = file_of_state(&job["file"]).map_or_else(String::new, |told| format!("; {told}"));
    match state.as_str() {
        "done" => match layers {
            0 => format!("{disk}: merged, {copied} copied\n"),
            1 => {
                format!("{disk}: merged, 1 layer left the chain, {copied} copied{file}\n")
            }
            _ => format!("{disk}: merged, {layers} layers left the chain, {copied} copied\n"),
        },
        _ => format!("{disk}: {kind} is {state}\n"),
    }
}

/// What has become of the file of a state that was dropped.
pub(super) fn file_of_state(file: &Value) -> Option<String> {
    let path = text(file.get("path")?);
    Some(match file["removed"] == true {
        true => format!("{path} is removed"),
        false => format!("{path} stays: {}", text(&file["reason"])),
    })
}

/// All of them.
pub(super) fn listed(jobs: &Value) -> String {
    let rows = jobs.as_array().into_iter().flatten().map(|job| {
        let number = |key: &str| job[key].as_u64().unwrap_or(0);
        let percent = (number("done") * 100).checked_div(number("total"));
        // One that had nothing to copy is as done as any.
        let percent = percent.unwrap_or(if job["state"] == "done" { 100 } else { 0 });
        let left = job["estimate_ms"].as_u64().map_or("-".to_owned(), |ms| duration(ms / 1000));
        vec![
            text(&job["disk"]),
            text(&job["kind"]),
            text(&job["state"]),
            format!("{percent} %"),
            human_size(number("copied_bytes")),
            format!("{}/s", human_size(number("rate"))),
            left,
            text(&job["failure"]),
        ]
    });
    let head = ["DISK", "KIND", "STATE", "DONE", "COPIED", "RATE", "LEFT", "FAILURE"];
    table(&head, &[3, 4, 5, 6], rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: of two merges given at once, one after the other was done, and the client of the
    /// first was told that the server has no record of it.
    #[test]
    fn merge_is_followed_to_its_end_when_another_one_has_begun_since() {
        let jobs = json!([{"disk": "web", "number": 3}, {"disk": "db", "number": 2}]);
        let answer = json!({"jobs": jobs, "past": [{"disk": "web", "number": 1, "state": "done"}]});
        let state = |number: u64| {
            let job = json!({"disk": "web", "number": number});
            found_in(&answer, &job).map(|found| found["state"].clone())
        };
        assert_eq!(state(1), Some("done".into()));
        assert_eq!(state(3), Some(Value::Null));
        assert_eq!(state(2), None);
    }

    #[test]
    fn merges_are_shown_with_how_far_they_are() {
        let jobs = json!([
            {"disk": "web", "kind": "stream", "state": "running", "done": 1 << 30,
             "total": 4_u64 << 30, "copied_bytes": 5 << 20, "rate": 1 << 20, "estimate_ms": 61_000},
            {"disk": "db", "kind": "commit", "state": "failed", "failure": "no room"},
            {"disk": "old", "kind": "commit", "state": "done", "done": 0, "total": 0},
        ]);
        assert_eq!(
            listed(&jobs),
            "DISK  KIND    STATE     DONE  COPIED     RATE       LEFT  FAILURE\n\
             web   stream  running   25 %   5 MiB  1 MiB/s  1 min 1 s  -\n\
             db    commit  failed     0 %     0 B    0 B/s          -  no room\n\
             old   commit  done     100 %     0 B    0 B/s          -  -\n"
        );
        let done = json!({"disk": "web", "kind": "stream", "state": "done", "dropped": ["a", "b"],
            "copied_bytes": 1 << 20});
        assert_eq!(one(&done), "web: merged, 2 layers left the chain, 1 MiB copied\n");
        let mut drop = json!({"disk": "web", "kind": "drop", "state": "done", "dropped": ["a"],
            "copied_bytes": 0, "file": {"path": "/a", "removed": true, "reason": null}});
        assert_eq!(one(&drop), "web: merged, 1 layer left the chain, 0 B copied; /a is removed\n");
        drop["file"] = json!({"path": "/a", "removed": false, "reason": "/b stands on it"});
        assert!(one(&drop).ends_with("copied; /a stays: /b stands on it\n"));
        assert_eq!(
            one(&json!({"disk": "w", "kind": "commit", "state": "paused"})),
            "w: commit is paused\n"
        );
    }
}
