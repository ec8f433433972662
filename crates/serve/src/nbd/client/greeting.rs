//! The first part of a connection: options, until an export is chosen. Waits for each answer.

use super::link::{Connection, Input, Link, SILENCE, lost};
use super::secure::Secure;
use super::{Client, Export, Place, Trust, Uri, broken, plain};
use crate::nbd::limits::PAYLOAD_BYTES_MAX;
use crate::nbd::protocol::peer::{
    Info, OPTION_ERROR, OptionReply, decode_context, decode_greeting, decode_listed, info_request,
    meta_request, option_message,
};
use crate::nbd::protocol::{handshake, info, option, option_reply};
use mica_block::{Error, ErrorKind, Result};
use mica_rt::connect_unix;
use rustls::ClientConnection;
use std::io;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

/// How long a server may be silent before the export is chosen.
const GREETING_SILENCE: Duration = SILENCE.saturating_mul(2);

/// Bytes of all answers to an option, at most.
const ANSWER_BYTES_MAX: u32 = 64 << 20;
/// Bytes that each answer to an option counts as besides its own: it takes memory, too.
const ANSWER_BYTES: u32 = 64;
/// Blocks of a server are at most this long ("Block size constraints").
const BLOCK_BYTES_MAX: u32 = 64 << 10;
/// Exports that an error names.
const NAMED_MAX: usize = 10;

/// A connection on which no export was chosen yet.
pub struct Greeting {
    connection: Arc<dyn Connection>,
    input: Input,
    export: String,
    /// Whether the server has structured replies, without which there are no contexts.
    is_structured: bool,
    /// Numbers of the contexts that were selected, in the order in which they were asked for.
    contexts: Vec<u32>,
}

/// What a server says to an option.
enum Answer {
    /// All replies before the last: their kinds and data.
    Given(Vec<(u32, Vec<u8>)>),
    Refused {
        kind: u32,
        text: String,
    },
}

impl Greeting {
    /// Connects to the server of `uri`.
    ///
    /// # Errors
    /// If there is none, if it speaks another protocol, or wants TLS and the URI does not, or the
    /// other way round; if they do not trust each other.
    pub fn connect(uri: &Uri) -> Result<Self> {
        let session = uri.trust.as_ref().map(Trust::session).transpose()?;
        let connection = connect(&uri.place, GREETING_SILENCE);
        let connection =
            connection.map_err(|error| Error::from_io("connecting to the server", error))?;
        Self::over(connection, uri.export.clone(), session)
    }

    pub(super) fn over(
        connection: Arc<dyn Connection>,
        export: String,
        session: Option<ClientConnection>,
    ) -> Result<Self> {
        let input = Input::new(Arc::clone(&connection));
        let contexts = Vec::new();
        let mut greeting = Self { connection, input, export, is_structured: false, contexts };
        let said = decode_greeting(&greeting.input.take()?);
        let flags = said.map_err(|_| broken("this is not a modern NBD server"))?;
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            return Err(broken("the server is too old: it lacks fixed newstyle"));
        }
        greeting.send(&u32::from(flags).to_be_bytes())?;
        if let Some(session) = session {
            greeting.start_tls(session)?;
        }
        match greeting.ask(option::STRUCTURED_REPLY, &[])? {
            Answer::Given(_) => greeting.is_structured = true,
            Answer::Refused { kind: option_reply::ERR_TLS_REQD, .. } => {
                let what = "the server wants TLS: write nbds:// and ?tls-certificates=DIRECTORY";
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            Answer::Refused { .. } => {}
        }
        Ok(greeting)
    }

    /// All that follows is encrypted.
    fn start_tls(&mut self, session: ClientConnection) -> Result<()> {
        if let Answer::Refused { text, .. } = self.ask(option::STARTTLS, &[])? {
            return Err(refused("the server does not support TLS", &text));
        }
        // Whoever is between the two could have put it there.
        if !self.input.is_empty() {
            return Err(broken(
                "the server sent data between agreeing to TLS and the TLS handshake",
            ));
        }
        self.connection = Secure::begin(Arc::clone(&self.connection), session)?;
        self.input = Input::new(Arc::clone(&self.connection));
        Ok(())
    }

    /// Whether the server can tell what contexts say.
    pub fn has_contexts(&self) -> bool {
        self.is_structured
    }

    /// The contexts that the export has and that begin with `namespace`.
    ///
    /// # Errors
    /// If there are no contexts, or no such export.
    pub fn list(&mut self, namespace: &str) -> Result<Vec<String>> {
        let contexts = self.contexts(option::LIST_META_CONTEXT, &[namespace])?;
        Ok(contexts.into_iter().map(|(_, name)| name).collect())
    }

    /// Selects these contexts, at most two. Returns one that the server lacks, or does not give.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn select<'a>(&mut self, wanted: &[&'a str]) -> Result<Option<&'a str>> {
        let found = self.contexts(option::SET_META_CONTEXT, wanted)?;
        self.contexts.clear();
        for wanted in wanted {
            let Some((id, _)) = found.iter().find(|(_, name)| name == wanted) else {
                return Ok(Some(wanted));
            };
            self.contexts.push(*id);
        }
        Ok(None)
    }

    fn contexts(&mut self, option: u32, queries: &[&str]) -> Result<Vec<(u32, String)>> {
        if !self.is_structured {
            let what = "the server lacks structured replies, and so cannot report what changed";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let data = meta_request(self.export.as_bytes(), queries);
        let replies = match self.ask(option, &data)? {
            Answer::Given(replies) => replies,
            Answer::Refused { kind: option_reply::ERR_UNKNOWN, text } => {
                return Err(self.no_export(&text));
            }
            // As if it had none of them: it may have structured replies for other reasons.
            Answer::Refused {
                kind: option_reply::ERR_UNSUP | option_reply::ERR_POLICY, ..
            } if option == option::SET_META_CONTEXT => {
                return Ok(Vec::new());
            }
            Answer::Refused { text, .. } => {
                return Err(refused("the server refuses contexts", &text));
            }
        };
        let mut contexts = Vec::new();
        for (_, data) in replies.iter().filter(|(kind, _)| *kind == option_reply::META_CONTEXT) {
            let context = decode_context(data).map_err(|_| broken("a context has no ID"));
            let (id, name) = context?;
            contexts.push((id, String::from_utf8_lossy(name).into()));
        }
        Ok(contexts)
    }

    /// Chooses the export.
    ///
    /// # Errors
    /// If there is none of this name, or the server refuses it.
    pub fn go(mut self) -> Result<Client> {
        let export = self.choose()?;
        let (connection, input, contexts) = self.into_parts();
        Ok(Client { link: Link::start(connection, input, contexts)?, export })
    }

    /// What goes on after the choice.
    pub(super) fn into_parts(self) -> (Arc<dyn Connection>, Input, Vec<u32>) {
        (self.connection, self.input, self.contexts)
    }

    pub(super) fn choose(&mut self) -> Result<Export> {
        let wanted = [info::DESCRIPTION, info::BLOCK_SIZE];
        let replies = match self.ask(option::GO, &info_request(self.export.as_bytes(), &wanted))? {
            Answer::Given(replies) => replies,
            Answer::Refused { kind: option_reply::ERR_UNKNOWN, text } => {
                return Err(self.no_export(&text));
            }
            Answer::Refused { text, .. } => {
                return Err(refused("the server refuses the export", &text));
            }
        };
        let mut export = Export {
            len: u64::MAX,
            description: String::new(),
            block_min: 1,
            read_max: u64::from(PAYLOAD_BYTES_MAX),
            flags: 0,
        };
        for (_, data) in replies.iter().filter(|(kind, _)| *kind == option_reply::INFO) {
            let said =
                Info::decode(data).map_err(|_| broken("an invalid description of the export"));
            match said? {
                Info::Export { len, flags } => (export.len, export.flags) = (len, flags),
                Info::Description(text) => {
                    export.description = String::from_utf8_lossy(text).into();
                }
                Info::BlockSize { minimum, maximum } => export.set_blocks(minimum, maximum)?,
                Info::Other => {}
            }
        }
        // Room to round it up.
        if export.len >= 1 << 62 {
            return Err(broken("the server does not report a length"));
        }
        Ok(export)
    }

    /// The error for an export that is not there.
    fn no_export(&mut self, text: &str) -> Error {
        let what = format!("the server has no export {:?}", self.export);
        let listed = match self.ask(option::LIST, &[]) {
            Ok(Answer::Given(listed)) => listed,
            _ => return refused(&what, text),
        };
        let names = listed.iter().filter(|(kind, _)| *kind == option_reply::SERVER);
        let names: Vec<_> = names
            .filter_map(|(_, data)| decode_listed(data).ok())
            .map(|name| format!("{:?}", plain(name)))
            .collect();
        let more = if names.len() > NAMED_MAX { ", …" } else { "" };
        let what = match &*names {
            [] => what,
            names => {
                let named = names[..names.len().min(NAMED_MAX)].join(", ");
                format!("{what}, only {named}{more}")
            }
        };
        Error::new(ErrorKind::NotFound, what)
    }

    /// Sends an option, and takes what the server says to it.
    fn ask(&mut self, option: u32, data: &[u8]) -> Result<Answer> {
        self.send(&option_message(option, data))?;
        let mut replies = Vec::new();
        let mut bytes_left = ANSWER_BYTES_MAX;
        loop {
            let senseless = || broken("the server's answer to an option is invalid");
            let head = OptionReply::decode(&self.input.take()?).map_err(|_| senseless())?;
            let left = bytes_left.checked_sub(ANSWER_BYTES);
            let left = left.and_then(|left| left.checked_sub(head.len));
            bytes_left = left.filter(|_| head.option == option).ok_or_else(senseless)?;
            let data = self.input.take_bytes(head.len)?;
            match head.kind {
                option_reply::ACK => return Ok(Answer::Given(replies)),
                kind if kind & OPTION_ERROR != 0 => {
                    return Ok(Answer::Refused { kind, text: plain(&data) });
                }
                kind => replies.push((kind, data)),
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> Result<()> {
        self.connection.write(bytes).map_err(lost)
    }
}

/// Connects to `place`. No step of that takes longer than `limit`, and nothing that follows until
/// another one is set.
fn connect(place: &Place, limit: Duration) -> io::Result<Arc<dyn Connection>> {
    let connection: Arc<dyn Connection> = match place {
        Place::Unix(path) => Arc::new(connect_unix(path, limit, || false)?),
        Place::Tcp { host, port } => {
            let socket = connect_tcp(host, *port, limit)?;
            socket.set_nodelay(true)?;
            Arc::new(socket)
        }
    };
    connection.limit(limit)?;
    Ok(connection)
}

/// The first address of `host` that takes a connection.
fn connect_tcp(host: &str, port: u16, limit: Duration) -> io::Result<TcpStream> {
    let mut outcome = Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    for address in (host, port).to_socket_addrs()? {
        outcome = TcpStream::connect_timeout(&address, limit);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

impl Export {
    fn set_blocks(&mut self, minimum: u32, maximum: u32) -> Result<()> {
        if !minimum.is_power_of_two() || minimum > BLOCK_BYTES_MAX || maximum < minimum {
            return Err(broken("the server's block sizes are invalid"));
        }
        self.block_min = minimum.into();
        self.read_max = u64::from(maximum.min(PAYLOAD_BYTES_MAX) & !(minimum - 1));
        Ok(())
    }
}

fn refused(what: &str, text: &str) -> Error {
    match text {
        "" => broken(what),
        text => broken(&format!("{what}: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// The story: a server that was stopped kept whoever connected to it for ever.
    #[test]
    fn connecting_to_a_server_that_takes_nobody_ends() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).expect("bound");
        // One waits; no other may.
        rustix::net::listen(&listener, 0).expect("listens");
        let limit = Duration::from_millis(20);
        let waits = connect_unix(&path, limit, || false).expect("there is a place");
        let refused = connect(&Place::Unix(path.clone()), limit).err().expect("no place");
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut, "{refused}");
        drop((listener.accept().expect("it waits"), waits));
        let taken = connect(&Place::Unix(path), limit).expect("a place again");
        // Nobody greets: that is limited, too.
        let refused = Greeting::over(taken, String::new(), None).err().expect("no greeting");
        assert!(refused.to_string().contains("does not answer"), "{refused}");
    }
}
