//! Asking a server for snapshots and merges, over the socket that it has for that: no program is
//! started, so that the server alone is measured.

use crate::peers::{MICA, Peer};
use anyhow::{Context as _, Result, bail, ensure};
use mica_tests::clock;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(60);
/// How often it is asked whether a merge is over.
const LOOKED_EVERY: Duration = Duration::from_millis(10);
/// What QEMU calls a merge.
const JOB: &str = "merge";

/// `peer`, to be written, with a control socket.
pub(crate) fn peer(peer: &Peer, control: &Path) -> Peer {
    let control = control.display().to_string();
    let chardev = format!("socket,id=control,path={control},server=on,wait=off");
    match &*peer.name {
        MICA => Peer::mica(&["--control", &control]),
        _ => Peer::qemu_storage_daemon(&["--chardev", &chardev, "--monitor", "chardev=control"]),
    }
    .writable()
}

/// How the control socket is asked.
pub(crate) enum Asker {
    /// mica: its socket, and the name of the disk.
    Http(PathBuf, String),
    /// QEMU: a connection, and the node of the active layer.
    Qmp(BufReader<UnixStream>, String),
}

impl Asker {
    /// # Errors
    /// If nobody listens.
    pub(crate) fn connect(peer: &Peer, control: &Path, top: &Path) -> Result<Self> {
        if peer.name == MICA {
            let name = top.file_stem().and_then(|name| name.to_str()).context("no name")?;
            return Ok(Self::Http(control.to_owned(), name.to_owned()));
        }
        let connect = || UnixStream::connect(control).ok();
        let stream = clock::poll(LIMIT, Duration::from_millis(5), connect).context("no monitor")?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut asker = Self::Qmp(BufReader::new(stream), "top".to_owned());
        asker.qmp(&json!({ "execute": "qmp_capabilities" }))?;
        Ok(asker)
    }

    /// Takes a snapshot: `file` becomes the active layer.
    ///
    /// # Errors
    /// If the server refuses.
    pub(crate) fn snapshot(&mut self, file: &Path) -> Result<()> {
        let stem = file.file_stem().and_then(|stem| stem.to_str()).context("no name")?.to_owned();
        let file = file.to_str().context("no text")?;
        match self {
            Self::Http(control, disk) => {
                let path = format!("/v1/disks/{disk}/snapshots");
                post(control, &path, &json!({ "label": file }))
            }
            Self::Qmp(_, node) => {
                let next = format!("layer-{stem}");
                let arguments = json!({
                    "node-name": node, "snapshot-file": file, "snapshot-node-name": next,
                    "format": "qcow2",
                });
                self.qmp(&json!({
                    "execute": "blockdev-snapshot-sync", "arguments": arguments,
                }))?;
                if let Self::Qmp(_, node) = self {
                    *node = next;
                }
                Ok(())
            }
        }
    }

    /// Merges all layers into the active one.
    ///
    /// # Errors
    /// If the server refuses, or the merge fails.
    pub(crate) fn stream(&mut self) -> Result<()> {
        match self {
            Self::Http(control, disk) => {
                post(control, &format!("/v1/disks/{disk}/stream"), &json!({}))?;
            }
            Self::Qmp(_, node) => {
                let arguments = json!({ "job-id": JOB, "device": node });
                self.qmp(&json!({ "execute": "block-stream", "arguments": arguments }))?;
            }
        }
        self.wait()
    }

    /// Merges the layers from `top`, beneath the active one, into the base.
    ///
    /// # Errors
    /// As [`Self::stream`].
    pub(crate) fn commit(&mut self, top: &Path) -> Result<()> {
        match self {
            Self::Http(control, disk) => {
                post(control, &format!("/v1/disks/{disk}/commit"), &json!({ "top": top }))?;
            }
            Self::Qmp(_, node) => {
                let arguments = json!({ "job-id": JOB, "device": node, "top": top });
                self.qmp(&json!({ "execute": "block-commit", "arguments": arguments }))?;
            }
        }
        self.wait()
    }

    /// Waits until no merge is under way.
    fn wait(&mut self) -> Result<()> {
        loop {
            let is_over = match self {
                Self::Http(control, _) => {
                    let told = request(control, "GET", "/v1/jobs", "")?;
                    let told = told.split_once("\r\n\r\n").context("no body")?.1;
                    let told: Value = serde_json::from_str(told)?;
                    let job = told["jobs"].get(0).context("no job")?;
                    match job["state"].as_str() {
                        Some("done") => true,
                        Some("running") => false,
                        _ => bail!("the merge failed: {job}"),
                    }
                }
                Self::Qmp(..) => {
                    let jobs = self.qmp(&json!({ "execute": "query-jobs" }))?;
                    let job = jobs.get(0);
                    if let Some(error) = job.map(|job| &job["error"]).filter(|why| !why.is_null()) {
                        bail!("the merge failed: {error}");
                    }
                    job.is_none()
                }
            };
            if is_over {
                return Ok(());
            }
            clock::sleep(LOOKED_EVERY);
        }
    }

    fn qmp(&mut self, ask: &Value) -> Result<Value> {
        let Self::Qmp(stream, _) = self else { bail!("no monitor") };
        stream.get_mut().write_all(format!("{ask}\n").as_bytes())?;
        loop {
            let mut line = String::new();
            ensure!(stream.read_line(&mut line)? > 0, "the monitor is gone");
            // Greetings and events have neither.
            let answer: Value = serde_json::from_str(&line)?;
            if !answer["error"].is_null() {
                bail!("{ask}: {answer}");
            }
            if let Some(found) = answer.get("return") {
                return Ok(found.clone());
            }
        }
    }
}

fn post(control: &Path, path: &str, body: &Value) -> Result<()> {
    request(control, "POST", path, &body.to_string()).map(drop)
}

fn request(control: &Path, verb: &str, path: &str, body: &str) -> Result<String> {
    let mut stream = UnixStream::connect(control)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let head = format!(
        "{verb} {path} HTTP/1.1\r\nhost: mica\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(answer)
}
