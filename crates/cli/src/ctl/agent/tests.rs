use super::*;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, channel};
use tempfile::TempDir;

/// How a guest agent answers a freeze.
#[derive(Clone, Copy)]
enum Manner {
    Obedient,
    Refusing,
    /// Answers only when it is told to thaw.
    Late,
    /// Thaws by itself before it is told to.
    Impatient,
}

/// An agent for one connection, and what it was told.
fn agent(manner: Manner) -> (TempDir, PathBuf, Receiver<String>) {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("agent");
    let listener = UnixListener::bind(&socket).expect("it listens");
    let (sender, told) = channel();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        // What somebody before us was not told any more.
        stream.write_all(b"{\"return\": 17}\n").expect("written");
        let mut late = String::new();
        let reader = BufReader::new(stream.try_clone().expect("a clone"));
        for line in reader.split(b'\n') {
            let Ok(mut line) = line else { return };
            line.retain(|byte| *byte != DELIMITER);
            let asked: Value = serde_json::from_slice(&line).expect("JSON");
            let command = asked["execute"].as_str().expect("a command").to_owned();
            let answer = match (&*command, manner) {
                ("guest-sync-delimited", _) => {
                    stream.write_all(late.as_bytes()).expect("written");
                    late.clear();
                    stream.write_all(&[DELIMITER]).expect("written");
                    format!("{{\"return\": {}}}\n", asked["arguments"]["id"])
                }
                ("guest-fsfreeze-freeze", Manner::Refusing) => {
                    "{\"error\": {\"class\": \"GenericError\", \"desc\": \"not now\"}}\n".to_owned()
                }
                ("guest-fsfreeze-freeze", Manner::Late) => {
                    late = "{\"return\": 3}\n".to_owned();
                    String::new()
                }
                ("guest-fsfreeze-thaw", Manner::Impatient) => "{\"return\": 0}\n".to_owned(),
                _ => "{\"return\": 3}\n".to_owned(),
            };
            stream.write_all(answer.as_bytes()).expect("written");
            if sender.send(command).is_err() {
                return;
            }
        }
    });
    (folder, socket, told)
}

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);
const ALL: [&str; 4] = [
    "guest-sync-delimited",
    "guest-fsfreeze-freeze",
    "guest-sync-delimited",
    "guest-fsfreeze-thaw",
];

fn told(all: &Receiver<String>) -> Vec<String> {
    let next = |_| all.recv_timeout(LONG).expect("it is told");
    (0..ALL.len()).map(next).collect()
}

#[test]
fn guests_are_frozen_while_something_is_done_and_thawed_afterwards() {
    let (_one, first, told_first) = agent(Manner::Obedient);
    let (_other, second, told_second) = agent(Manner::Obedient);
    let done = while_frozen(&[first, second], LONG, || Ok(7));
    assert_eq!(done.expect("done"), 7);
    assert_eq!(
        (told(&told_first), told(&told_second)),
        (ALL.map(str::to_owned).to_vec(), ALL.map(str::to_owned).to_vec())
    );
}

#[test]
fn guest_is_thawed_when_what_was_to_be_done_fails() {
    let (_folder, socket, told_all) = agent(Manner::Obedient);
    let done = while_frozen::<()>(&[socket], LONG, || Err(Failure::new("no room")));
    assert!(format!("{:?}", done.expect_err("it fails")).contains("no room"));
    assert_eq!(told(&told_all), ALL);
}

#[test]
fn nothing_is_done_if_a_guest_is_not_frozen_and_it_is_told_to_thaw() {
    for (manner, limit, why) in
        [(Manner::Refusing, LONG, "not now"), (Manner::Late, SHORT, "no answer")]
    {
        let (_folder, socket, told_all) = agent(manner);
        let done = while_frozen(&[socket], limit, || -> Result<(), Failure> {
            panic!("it is not frozen")
        });
        let said = format!("{:?}", done.expect_err("it fails"));
        assert!(said.contains(why), "{said}");
        assert_eq!(told(&told_all), ALL);
    }
}

#[test]
fn guest_that_thawed_too_early_is_reported() {
    let (_folder, socket, _told) = agent(Manner::Impatient);
    let done = while_frozen(&[socket], LONG, || Ok(()));
    let said = format!("{:?}", done.expect_err("it fails"));
    assert!(said.contains("was taken, but") && said.contains("already been thawed"), "{said}");
}

/// The story: `connect` waited for as long as another client had the agent, and heard no signal.
#[test]
fn agent_that_takes_no_connection_is_given_up_at_the_limit_and_by_a_signal() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("agent");
    let listener = UnixListener::bind(&socket).expect("it listens");
    rustix::net::listen(&listener, 0).expect("it lets one wait");
    let try_it = |limit, stop| connected(&socket, limit, &AtomicBool::new(stop));
    let mut waiting = Vec::new();
    let said = loop {
        match try_it(Duration::from_millis(50), false) {
            Ok(stream) => waiting.push(stream),
            Err(failure) => break failure,
        }
        assert!(waiting.len() < 100, "nobody takes them");
    };
    assert!(said.message().contains("takes no connection"), "{}", said.message());
    let said = try_it(Duration::from_secs(3600), true).expect_err("a signal came");
    assert!(said.message().contains("signal"), "{}", said.message());
    let said = while_frozen(&[socket], Duration::from_millis(50), || Ok(()));
    assert!(said.is_err());
}
