//! The handshake: fixed newstyle negotiation, up to the choice of an export.
//!
//! Everything here is bounded: options and their bytes are counted, data that will not be looked at
//! is skipped in a small buffer, and the caller puts a deadline on the whole.

mod inbox;

use super::channel::Channel;
use super::contexts::{ContextNumber, Contexts, lists};
use super::entry::{Client, Entry};
use super::exports::{Exports, Found, Patience};
use super::handshake::Handshake;
use super::limits::{
    LISTED_AT_ONCE, NAME_BYTES_MAX, OPTION_BYTES_MAX, OPTION_BYTES_SKIPPED_MAX,
    OPTION_BYTES_TOTAL_MAX, OPTIONS_MAX, OPTIONS_PER_EXPORT, PAYLOAD_BYTES_MAX,
};
use super::protocol::{
    self, InfoRequest, MetaRequest, OptionHeader, handshake, info, option, option_reply,
    transmission,
};
use super::reply::ReplyStyle;
use super::session::Transmission;
use inbox::Inbox;
use mica_block::Disk;
use mica_rt::Buf;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Weak};

/// Why a handshake ended without a session.
#[derive(Debug)]
pub(super) enum Refused {
    /// The client changed its mind.
    Aborted,
    /// The client closed the connection.
    Closed,
    /// The client broke the protocol, or asked for an export that is not there in the old way,
    /// which has no other answer.
    Malformed(&'static str),
    /// The client never comes to an end.
    TooMuch,
    /// The export has as many clients as it may have, or is being stopped.
    Full,
    /// There is no TLS, though both sides wanted it.
    Tls(io::Error),
    /// The connection failed.
    Io(io::Error),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Aborted => f.write_str("the client aborted the negotiation"),
            Self::Closed => f.write_str("the client closed the connection"),
            Self::Malformed(what) => write!(f, "the client sent {what}"),
            Self::Full => f.write_str("the export takes no further client"),
            Self::TooMuch => f.write_str("the client sent too many options"),
            Self::Tls(error) => write!(f, "TLS could not be established: {error}"),
            Self::Io(error) => write!(f, "the connection failed: {error}"),
        }
    }
}

/// The state of TLS for the next options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Security {
    /// There is none.
    Plain,
    /// A client may start it.
    Offered,
    /// A client has to start it: nothing is disclosed before ("FORCEDTLS mode").
    Required,
    /// It is there.
    Established,
}

/// How a handshake continues.
pub(super) enum Negotiated {
    /// To the transmission phase.
    Transmission(Transmission),
    /// To TLS, and then to [`haggle`] with the same client flags. They are all that is kept.
    StartTls { flags: u16 },
}

/// Where a client is until it has chosen an export.
#[derive(Clone, Copy)]
pub(super) struct Reception<'a> {
    pub(super) exports: &'a Exports,
    /// The executor that this runs on.
    pub(super) queue: usize,
    /// The client's place.
    pub(super) here: &'a Handshake,
}

/// Carries out the handshake.
pub(super) async fn negotiate(
    channel: &impl Channel,
    reception: Reception<'_>,
    security: Security,
) -> Result<Negotiated, Refused> {
    let mut inbox = Inbox::new(channel);
    send(channel, &protocol::greeting()).await?;
    let flags = protocol::decode_client_flags(inbox.array().await?)
        .map_err(|_| Refused::Malformed("unknown client flags"))?;
    options(channel, inbox, reception, flags, security).await
}

/// Continues the handshake behind TLS.
pub(super) async fn haggle(
    channel: &impl Channel,
    reception: Reception<'_>,
    flags: u16,
) -> Result<Transmission, Refused> {
    let inbox = Inbox::new(channel);
    match options(channel, inbox, reception, flags, Security::Established).await? {
        Negotiated::Transmission(transmission) => Ok(transmission),
        Negotiated::StartTls { .. } => unreachable!("it is there already"),
    }
}

/// "Option haggling".
async fn options<C: Channel>(
    channel: &C,
    mut inbox: Inbox<'_, C>,
    Reception { exports, queue, here }: Reception<'_>,
    flags: u16,
    security: Security,
) -> Result<Negotiated, Refused> {
    let mut negotiation = Negotiation {
        exports,
        queue,
        flags,
        security,
        style: ReplyStyle::Simple,
        selected: None,
        patience: Patience::default(),
    };
    let mut bytes_total = 0_u64;
    for _ in 0..OPTIONS_MAX + OPTIONS_PER_EXPORT * exports.len() {
        let header = OptionHeader::decode(&inbox.array().await?)
            .map_err(|_| Refused::Malformed("not an option"))?;
        here.hear();
        bytes_total += u64::from(header.len);
        if header.len > OPTION_BYTES_SKIPPED_MAX || bytes_total > OPTION_BYTES_TOTAL_MAX {
            return Err(Refused::TooMuch);
        }
        let fixed = flags & handshake::FIXED_NEWSTYLE != 0;
        if !fixed && header.option != option::EXPORT_NAME {
            return Err(Refused::Malformed("an option without fixed newstyle"));
        }
        let mut out = Vec::new();
        let step = if let Some((error, text)) = negotiation.unread(&header)? {
            inbox.skip(header.len).await?;
            negotiation.reply(&mut out, header.option, error, &[text]);
            Step::Next
        } else {
            let data = inbox.data(header.len as usize).await?;
            negotiation.step(header.option, &data, &mut out).await?
        };
        if matches!(step, Step::StartTls) && !inbox.rest().is_empty() {
            // It was sent before encryption began, so it must not be trusted afterwards.
            return Err(Refused::Malformed("plain text behind STARTTLS"));
        }
        match &step {
            // Whoever stops the export waits for its clients, which may take no reply.
            Step::Transmit { client, .. } => {
                let stop = &client.entry().stop;
                stop.unless_raised(send(channel, &out)).await.ok_or(Refused::Full)??;
            }
            _ => send(channel, &out).await?,
        }
        match step {
            Step::Next => {}
            Step::List => list(channel, exports).await?,
            Step::Abort => return Err(Refused::Aborted),
            Step::StartTls => return Ok(Negotiated::StartTls { flags }),
            Step::Transmit { client, contexts } => {
                return Ok(Negotiated::Transmission(Transmission {
                    client,
                    style: negotiation.style,
                    contexts,
                    leftover: inbox.rest().to_vec(),
                }));
            }
        }
    }
    Err(Refused::TooMuch)
}

/// Answers "NBD_OPT_LIST", a page at a time: between two pages nothing is held.
async fn list(channel: &impl Channel, exports: &Exports) -> Result<(), Refused> {
    let mut last: Option<String> = None;
    loop {
        let mut out = Vec::new();
        last = {
            let page = exports.page(last.as_deref(), LISTED_AT_ONCE);
            for export in &page.exports {
                let (name, description) = (export.name(), export.description());
                let name_len = u32::try_from(name.len()).expect("checked at the start");
                let data: [&[u8]; 3] =
                    [&name_len.to_be_bytes(), name.as_bytes(), description.as_bytes()];
                protocol::put_option_reply(&mut out, option::LIST, option_reply::SERVER, &data);
            }
            page.last
        };
        if last.is_none() {
            protocol::put_option_reply(&mut out, option::LIST, option_reply::ACK, &[]);
            return send(channel, &out).await;
        }
        send(channel, &out).await?;
    }
}

/// What an option leads to.
enum Step {
    Next,
    List,
    Abort,
    StartTls,
    Transmit { client: Client, contexts: Rc<[ContextNumber]> },
}

fn is_known(option: u32) -> bool {
    matches!(
        option,
        option::EXPORT_NAME
            | option::ABORT
            | option::LIST
            | option::STARTTLS
            | option::INFO
            | option::GO
            | option::STRUCTURED_REPLY
            | option::LIST_META_CONTEXT
            | option::SET_META_CONTEXT
    )
}

/// What was negotiated so far. Does no I/O: options go in, replies come out.
struct Negotiation<'a> {
    exports: &'a Exports,
    /// The executor that this runs on.
    queue: usize,
    flags: u16,
    security: Security,
    style: ReplyStyle,
    selected: Option<Selected>,
    patience: Patience,
}

/// The contexts that were selected.
struct Selected {
    name: Vec<u8>,
    /// The export that was called so: by the time that it is chosen that may be another one, which
    /// has other contexts. It may end meanwhile.
    of: Weak<Entry>,
    contexts: Rc<[ContextNumber]>,
}

impl Negotiation<'_> {
    fn reply(&self, out: &mut Vec<u8>, option: u32, reply: u32, data: &[&[u8]]) {
        protocol::put_option_reply(out, option, reply, data);
    }

    fn invalid(&self, out: &mut Vec<u8>, option: u32, text: &str) -> Step {
        self.reply(out, option, option_reply::ERR_INVALID, &[text.as_bytes()]);
        Step::Next
    }

    fn unknown_export(&self, out: &mut Vec<u8>, option: u32, why: &str) -> Step {
        self.reply(out, option, option_reply::ERR_UNKNOWN, &[why.as_bytes()]);
        Step::Next
    }

    /// Makes this connection a client of `entry`, if it takes one.
    fn admit(&self, entry: &Arc<Entry>) -> Option<Client> {
        let client = entry.admit();
        if client.is_none() {
            entry.stats(self.queue).connections_refused.add(1);
        }
        client
    }

    /// The error reply to an option whose data is not even read, if it is one.
    fn unread(&self, header: &OptionHeader) -> Result<Option<(u32, &'static [u8])>, Refused> {
        let is_name = header.option == option::EXPORT_NAME;
        let is_secret = self.security == Security::Required;
        if is_secret && !matches!(header.option, option::STARTTLS | option::ABORT) {
            return match is_name {
                true => Err(Refused::Malformed("the name of an export before TLS")),
                false => Ok(Some((option_reply::ERR_TLS_REQD, b"start TLS first"))),
            };
        }
        let is_there = header.option != option::STARTTLS || self.security != Security::Plain;
        if !is_known(header.option) || !is_there {
            let text = b"this server does not know that option";
            return Ok(Some((option_reply::ERR_UNSUP, text)));
        }
        match header.len as usize > OPTION_BYTES_MAX {
            true if is_name => Err(Refused::Malformed("a name beyond the limit")),
            true => Ok(Some((option_reply::ERR_TOO_BIG, b""))),
            false => Ok(None),
        }
    }

    async fn step(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Result<Step, Refused> {
        Ok(match option {
            option::EXPORT_NAME => return self.export_name(data, out).await,
            option::ABORT => {
                self.reply(out, option, option_reply::ACK, &[]);
                Step::Abort
            }
            option::LIST => self.list(data, out),
            option::STARTTLS => self.start_tls(data, out),
            option::INFO | option::GO => self.info_or_go(option, data, out).await,
            option::STRUCTURED_REPLY => self.structured_reply(data, out),
            _ => self.meta(option, data, out).await,
        })
    }

    /// "NBD_OPT_EXPORT_NAME": has no error reply.
    async fn export_name(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<Step, Refused> {
        if data.len() > NAME_BYTES_MAX {
            return Err(Refused::Malformed("a name beyond the limit"));
        }
        let Found::Served(entry) = self.exports.find(data, &mut self.patience).await else {
            return Err(Refused::Malformed("an unknown export name in the old style"));
        };
        let client = self.admit(&entry).ok_or(Refused::Full)?;
        let disk = &*entry.export.disk;
        let info = protocol::info_export(disk.geometry().len, self.transmission_flags(disk));
        out.extend(&info[2..]);
        if self.flags & handshake::NO_ZEROES == 0 {
            out.extend([0; protocol::EXPORT_NAME_PADDING]);
        }
        let contexts = self.selected(data, &entry);
        Ok(Step::Transmit { client, contexts })
    }

    /// "NBD_OPT_STARTTLS".
    fn start_tls(&self, data: &[u8], out: &mut Vec<u8>) -> Step {
        if !data.is_empty() {
            return self.invalid(out, option::STARTTLS, "STARTTLS has no data");
        }
        if self.security == Security::Established {
            return self.invalid(out, option::STARTTLS, "TLS is already in use");
        }
        self.reply(out, option::STARTTLS, option_reply::ACK, &[]);
        Step::StartTls
    }

    fn list(&self, data: &[u8], out: &mut Vec<u8>) -> Step {
        if !data.is_empty() {
            return self.invalid(out, option::LIST, "LIST has no data");
        }
        Step::List
    }

    /// "NBD_OPT_INFO and NBD_OPT_GO".
    async fn info_or_go(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        let Ok(request) = InfoRequest::decode(data) else {
            return self.invalid(out, option, "malformed data");
        };
        let entry = match self.exports.find(request.name, &mut self.patience).await {
            Found::Served(entry) => entry,
            Found::None(why) => return self.unknown_export(out, option, &why),
        };
        let export = &entry.export;
        let client = match option == option::GO {
            true => match self.admit(&entry) {
                Some(client) => Some(client),
                None => {
                    let text = b"the export has as many clients as it may have: try again later";
                    self.reply(out, option, option_reply::ERR_POLICY, &[text]);
                    return Step::Next;
                }
            },
            false => None,
        };
        let mut inform = |data: &[&[u8]]| self.reply(out, option, option_reply::INFO, data);
        let geometry = export.disk.geometry();
        let flags = self.transmission_flags(&*export.disk);
        inform(&[&protocol::info_export(geometry.len, flags)]);
        if request.asks_for(info::NAME) {
            inform(&[&info::NAME.to_be_bytes(), export.name.as_bytes()]);
        }
        if request.asks_for(info::DESCRIPTION) && !export.description.is_empty() {
            inform(&[&info::DESCRIPTION.to_be_bytes(), export.description.as_bytes()]);
        }
        if request.asks_for(info::BLOCK_SIZE) {
            let preferred = preferred_bytes(geometry.preferred_bytes);
            inform(&[&protocol::info_block_size(1, preferred, PAYLOAD_BYTES_MAX)]);
        }
        self.reply(out, option, option_reply::ACK, &[]);
        match client {
            Some(client) => {
                Step::Transmit { client, contexts: self.selected(request.name, &entry) }
            }
            None => Step::Next,
        }
    }

    fn structured_reply(&mut self, data: &[u8], out: &mut Vec<u8>) -> Step {
        if !data.is_empty() {
            return self.invalid(out, option::STRUCTURED_REPLY, "STRUCTURED_REPLY has no data");
        }
        if self.style == ReplyStyle::Structured {
            return self.invalid(out, option::STRUCTURED_REPLY, "asked for twice");
        }
        self.style = ReplyStyle::Structured;
        self.reply(out, option::STRUCTURED_REPLY, option_reply::ACK, &[]);
        Step::Next
    }

    /// "NBD_OPT_LIST_META_CONTEXT" and "NBD_OPT_SET_META_CONTEXT".
    async fn meta(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        let selects = option == option::SET_META_CONTEXT;
        if selects {
            // Replaces the selection "including when this command fails".
            self.selected = None;
        }
        if self.style == ReplyStyle::Simple {
            return self.invalid(out, option, "structured replies must be negotiated first");
        }
        let Ok(request) = MetaRequest::decode(data) else {
            return self.invalid(out, option, "malformed data");
        };
        let entry = match self.exports.find(request.name, &mut self.patience).await {
            Found::Served(entry) => entry,
            Found::None(why) => return self.unknown_export(out, option, &why),
        };
        let lists_all = !selects && request.queries.is_empty();
        let is_asked = |name: &[u8]| match selects {
            true => request.queries.contains(&name),
            false => lists_all || request.queries.iter().any(|query| lists(query, name)),
        };
        let mut selected = Vec::new();
        for (number, name) in Contexts(&entry.export.contexts).all() {
            if is_asked(name) {
                let id = if selects { number.id() } else { 0 };
                self.reply(out, option, option_reply::META_CONTEXT, &[&id.to_be_bytes(), name]);
                selected.push(number);
            }
        }
        if selects {
            let (name, of) = (request.name.to_vec(), Arc::downgrade(&entry));
            self.selected = Some(Selected { name, of, contexts: selected.into() });
        }
        self.reply(out, option, option_reply::ACK, &[]);
        Step::Next
    }

    /// What was selected for `entry` under this name.
    fn selected(&self, name: &[u8], entry: &Arc<Entry>) -> Rc<[ContextNumber]> {
        let is_it = |selected: &&Selected| {
            selected.name == name && std::ptr::eq(selected.of.as_ptr(), Arc::as_ptr(entry))
        };
        let selected = self.selected.as_ref().filter(is_it);
        selected.map_or_else(Rc::default, |selected| Rc::clone(&selected.contexts))
    }

    /// As qemu-nbd: where nothing is written, a flush or a FUA flag has nothing to do and is
    /// accepted; all connections see the same disk, and a flush on one is a flush for all.
    fn transmission_flags(&self, disk: &dyn Disk) -> u16 {
        let df = if self.style == ReplyStyle::Structured { transmission::SEND_DF } else { 0 };
        let writing = if disk.is_writable() {
            transmission::SEND_TRIM | transmission::SEND_WRITE_ZEROES | transmission::SEND_FAST_ZERO
        } else {
            transmission::READ_ONLY
        };
        transmission::HAS_FLAGS
            | transmission::SEND_FLUSH
            | transmission::SEND_FUA
            | transmission::CAN_MULTI_CONN
            | writing
            | df
    }
}

/// "Size constraints": a power of two, at least 512 and at most the largest payload.
fn preferred_bytes(preferred: u32) -> u32 {
    preferred.clamp(512, PAYLOAD_BYTES_MAX).next_power_of_two()
}

async fn send(channel: &impl Channel, bytes: &[u8]) -> Result<(), Refused> {
    channel.send(VecDeque::from([Buf::from_slice(bytes)])).await.map_err(Refused::Io)
}

#[cfg(test)]
mod tests;
