//! URIs of NBD exports, as clients write them.

use crate::tls::Trust;
use mica_block::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::str::FromStr;

const PORT: u16 = 10809;

/// Where an export is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Uri {
    /// Its server.
    pub place: Place,
    /// Its name; the default one has none.
    pub export: String,
    /// Whom to trust, if the connection is to be encrypted.
    pub trust: Option<Trust>,
}

/// Where a server listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// At a socket in the file system.
    Unix(PathBuf),
    /// On a network.
    Tcp {
        /// A name, or an address without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

impl Uri {
    /// Whether `named` is meant as a URI of an export. Who has such a file writes ./ in front.
    pub fn is_meant(named: &str) -> bool {
        named.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
    }
}

impl FromStr for Uri {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |why: &str| Err(Error::new(ErrorKind::Invalid, format!("{text}: {why}")));
        let Some((scheme, rest)) = text.split_once("://") else {
            return refuse("this is not a URI");
        };
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, export) = path.split_once('/').unwrap_or((path, ""));
        let Some(export) = decoded(export) else { return refuse("the export's name is not text") };
        let (scheme, is_secure) = match scheme {
            "nbds" => ("nbd", true),
            "nbds+unix" => ("nbd+unix", true),
            scheme => (scheme, false),
        };
        let place = match scheme {
            "nbd+unix" => match (value_in(query, "socket"), host) {
                (Some(socket), "") => Place::Unix(PathBuf::from(socket)),
                _ => return refuse("write nbd+unix:///EXPORT?socket=PATH"),
            },
            "nbd" => match tcp(host) {
                Some(place) => place,
                None => return refuse("write nbd://HOST:PORT/EXPORT"),
            },
            _ => return refuse("only nbd://, nbd+unix://, nbds:// and nbds+unix:// are known"),
        };
        let trust = match (is_secure, value_in(query, CERTIFICATES)) {
            (false, None) => None,
            (false, Some(_)) => return refuse("with certificates, write nbds:// or nbds+unix://"),
            (true, Some(directory)) => {
                let server = match &place {
                    Place::Tcp { host, .. } => host,
                    Place::Unix(_) => "localhost",
                };
                let server = value_in(query, HOST_NAME).unwrap_or_else(|| server.to_owned());
                Some(Trust { directory: directory.into(), server })
            }
            (true, None) => {
                return refuse("add tls-certificates=DIRECTORY to the part behind the ?");
            }
        };
        if let Some(unknown) = query.split('&').find(|part| is_unknown_tls(part)) {
            return refuse(&format!(
                "{unknown:?} is not known: only {CERTIFICATES} and {HOST_NAME}"
            ));
        }
        Ok(Self { place, export, trust })
    }
}

/// The directory of certificates, as libnbd calls it.
const CERTIFICATES: &str = "tls-certificates";
/// The name that the server's certificate has to have, if it is another one than in the URI.
const HOST_NAME: &str = "tls-hostname";

/// Whether a part of a query asks for something of TLS that is not done: not to do it might be
/// less safe than what was wanted.
fn is_unknown_tls(part: &str) -> bool {
    let key = part.split('=').next().unwrap_or(part);
    key.starts_with("tls-") && key != CERTIFICATES && key != HOST_NAME
}

/// What a query says of `key`, unless that is nothing.
fn value_in(query: &str, key: &str) -> Option<String> {
    let values = query.split('&').filter_map(|part| part.split_once('='));
    let value = values.filter(|(its, _)| *its == key).find_map(|(_, value)| decoded(value));
    value.filter(|value| !value.is_empty())
}

/// The place at `host`, perhaps with a port.
fn tcp(host: &str) -> Option<Place> {
    let (host, port) = match host.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
        _ => (host, PORT),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| Place::Tcp { host: host.to_owned(), port })
}

/// A part of a URI without its escapes; `None` if that is no text.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_those_of_other_clients() {
        let uri = |text: &str| text.parse::<Uri>().map_err(|error| error.to_string());
        let unix = |path: &str| Place::Unix(PathBuf::from(path));
        let tcp = |host: &str, port| Place::Tcp { host: host.to_owned(), port };
        for (text, place, export) in [
            ("nbd+unix:///web?socket=/run/s", unix("/run/s"), "web"),
            ("nbd+unix:///?socket=/a%20b%26c", unix("/a b&c"), ""),
            ("nbd://localhost", tcp("localhost", 10809), ""),
            ("nbd://localhost:1/a%2fb", tcp("localhost", 1), "a/b"),
            ("nbd://[::1]:1234/x", tcp("::1", 1234), "x"),
            ("nbd://[::1]/x", tcp("::1", 10809), "x"),
        ] {
            let wanted = Uri { place, export: export.to_owned(), trust: None };
            assert_eq!(uri(text), Ok(wanted), "{text}");
        }
        for bad in [
            "nbd+unix:///web",
            "nbd://",
            "nbd://:1/",
            "nbd://h:x/",
            "nbds://h/",
            "nbd:x",
            "nbd://h/%+f",
        ] {
            assert!(uri(bad).is_err(), "{bad}");
        }
        let secure = [
            ("nbds://h:1/web?tls-certificates=/p%20q", tcp("h", 1), "h"),
            ("nbds://h/web?tls-certificates=/p%20q&tls-hostname=x.y", tcp("h", 10809), "x.y"),
            ("nbds+unix:///web?socket=/s&tls-certificates=/p%20q", unix("/s"), "localhost"),
        ];
        for (text, place, server) in secure {
            let trust = Trust { directory: "/p q".into(), server: server.to_owned() };
            let wanted = Uri { place, export: "web".to_owned(), trust: Some(trust) };
            assert_eq!(uri(text), Ok(wanted), "{text}");
        }
        for less_safe in [
            "nbd://h/?tls-certificates=/p",
            "nbds://h/?tls-certificates=",
            "nbds://h/?tls-certificates=/p&tls-psk-file=/f",
            "nbd://h/?tls-verify-peer=true",
        ] {
            assert!(uri(less_safe).is_err(), "{less_safe}");
        }
        assert!(Uri::is_meant("nbd+unix:///web?socket=/s") && Uri::is_meant("nbds://host"));
        assert!(!Uri::is_meant("/nbd://") && !Uri::is_meant("nbd:host:10809"));
    }
}
