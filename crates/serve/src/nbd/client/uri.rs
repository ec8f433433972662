//! URIs of NBD exports, as clients write them.

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
            return refuse("this is no URI");
        };
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, export) = path.split_once('/').unwrap_or((path, ""));
        let Some(export) = decoded(export) else { return refuse("the export's name is no text") };
        match scheme {
            "nbd+unix" => {
                let socket = query.split('&').find_map(|part| part.strip_prefix("socket="));
                let socket = socket.and_then(decoded).filter(|socket| !socket.is_empty());
                match (socket, host) {
                    (Some(socket), "") => {
                        Ok(Self { place: Place::Unix(PathBuf::from(socket)), export })
                    }
                    _ => refuse("write nbd+unix:///EXPORT?socket=PATH"),
                }
            }
            "nbd" => {
                let (host, port) = match host.rsplit_once(':') {
                    Some((host, port)) if !port.ends_with(']') => match port.parse() {
                        Ok(port) => (host, port),
                        Err(_) => return refuse("write nbd://HOST:PORT/EXPORT"),
                    },
                    _ => (host, PORT),
                };
                let host = host.trim_start_matches('[').trim_end_matches(']');
                if host.is_empty() {
                    return refuse("write nbd://HOST:PORT/EXPORT");
                }
                Ok(Self { place: Place::Tcp { host: host.to_owned(), port }, export })
            }
            "nbds" | "nbds+unix" => refuse(
                "mica is no client of TLS: export it at a unix socket, and bring that here with \
                 ssh -L, or run mica where the server is",
            ),
            _ => refuse("only nbd:// and nbd+unix:// are known"),
        }
    }
}

/// A part of a URI without its escapes; `None` if that is no text.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
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
            assert_eq!(uri(text), Ok(Uri { place, export: export.to_owned() }), "{text}");
        }
        for bad in ["nbd+unix:///web", "nbd://", "nbd://:1/", "nbd://h:x/", "nbds://h/", "nbd:x"] {
            assert!(uri(bad).is_err(), "{bad}");
        }
        assert!(Uri::is_meant("nbd+unix:///web?socket=/s") && Uri::is_meant("nbds://host"));
        assert!(!Uri::is_meant("/nbd://") && !Uri::is_meant("nbd:host:10809"));
    }
}
