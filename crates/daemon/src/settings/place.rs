//! Where NBD clients connect, as people write it.
//!
//! What users of other NBD servers write becomes one of two kinds of places, or is refused with the
//! form that it has here: it must not become the name of a socket by accident, nor a port that is
//! open to others.

use crate::address::Address;
use mica_block::{Error, ErrorKind, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The port of NBD.
const PORT: &str = "10809";
const LOOPBACK: &str = "127.0.0.1";

/// Where NBD clients connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NbdPlace {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl NbdPlace {
    /// The same as it is meant in `folder`.
    #[must_use]
    pub fn resolved(&self, folder: &Path) -> Self {
        match self {
            Self::Unix(path) => Self::Unix(folder.join(path)),
            Self::Tcp(address) => Self::Tcp(*address),
        }
    }

    /// The same in a form that can be compared; `None` if there is none.
    pub(crate) fn address(&self) -> Option<Address> {
        match self {
            Self::Unix(path) => Address::unix(path),
            Self::Tcp(address) => Some(Address::Tcp(*address)),
        }
    }
}

impl FromStr for NbdPlace {
    type Err = Error;

    /// # Errors
    /// `Invalid` with the form to use.
    fn from_str(text: &str) -> Result<Self> {
        let invalid =
            |what: String| Err(Error::new(ErrorKind::Invalid, format!("nbd {text:?}: {what}")));
        if let Some(path) = text.strip_prefix(UNIX)
            && !path.starts_with("//")
        {
            return match path {
                "" => invalid("it names no socket: write unix:PATH".to_owned()),
                path => Ok(Self::Unix(path.into())),
            };
        }
        if let Some((scheme, rest)) = text.split_once("://") {
            let form = form_of_uri(scheme, rest);
            return invalid(format!("a URI is for clients: to listen there, write {form}"));
        }
        if let Some(address) = text.strip_prefix("tcp:") {
            return tcp(address).map(Self::Tcp).or_else(invalid);
        }
        match host_and_port(text) {
            Some((host, port)) => invalid(format!(
                "this looks like a TCP address: write tcp:{host}:{port}, or unix:./{text} for a \
                 socket of that name"
            )),
            None if text.is_empty() => invalid("it names no socket: write a path".to_owned()),
            None => Ok(Self::Unix(text.into())),
        }
    }
}

impl fmt::Display for NbdPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl Serialize for NbdPlace {
    /// In a form that is read as the same place: a path alone, unless that looks like another.
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let Self::Unix(path) = self else { return serializer.collect_str(self) };
        let no_text = || ser::Error::custom("path contains invalid UTF-8 characters");
        let path = path.to_str().ok_or_else(no_text)?;
        match path.parse().is_ok_and(|place: Self| place == *self) {
            true => serializer.serialize_str(path),
            false => serializer.serialize_str(&format!("{UNIX}{path}")),
        }
    }
}

impl<'de> Deserialize<'de> for NbdPlace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Written;
        impl de::Visitor<'_> for Written {
            type Value = NbdPlace;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            // From inside the visitor an error gets its place in the file.
            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<NbdPlace, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Written)
    }
}

/// Begins the place of a unix socket that could be taken for another one.
const UNIX: &str = "unix:";

/// The TCP address that is written as HOST:PORT.
fn tcp(text: &str) -> std::result::Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let form = match host_and_port(text) {
        Some((host, port)) if text.starts_with(&host) && !host.is_empty() => {
            let found = format!("{host}:{port}").to_socket_addrs();
            let found =
                found.map_err(|error| format!("cannot find the address of {host}: {error}"));
            let mut found: Vec<_> = found?.collect();
            // Most clients try this one of localhost, whatever comes first here.
            found.sort_by_key(SocketAddr::is_ipv6);
            let first = found.first().copied();
            return first.ok_or_else(|| format!("{host} has no address"));
        }
        Some((host, port)) => format!("tcp:{host}:{port}"),
        None => format!("tcp:HOST:PORT, for example tcp:{LOOPBACK}:{PORT}"),
    };
    Err(format!("invalid TCP address: write {form}"))
}

/// The parts of what looks like HOST:PORT, :PORT or PORT; without a host it is the loopback.
fn host_and_port(text: &str) -> Option<(String, &str)> {
    let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
    let is_port = (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit());
    let host = if host.is_empty() { LOOPBACK } else { host };
    (is_port && !text.contains('/')).then(|| (host.to_owned(), port))
}

fn form_of_uri(scheme: &str, rest: &str) -> String {
    if scheme.ends_with("+unix") {
        let socket = rest.split(['?', '&']).find_map(|part| part.strip_prefix("socket="));
        return format!("unix:{}", socket.unwrap_or("PATH"));
    }
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    match (scheme, host_and_port(authority)) {
        ("nbd" | "nbds", Some((host, port))) if authority.contains(':') => {
            format!("tcp:{host}:{port}")
        }
        ("nbd" | "nbds", _) => {
            format!("tcp:{}:{PORT}", if authority.is_empty() { LOOPBACK } else { authority })
        }
        _ => format!("unix:PATH or tcp:{LOOPBACK}:{PORT}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_have_one_form() {
        for (text, form) in [
            ("/run/a.sock", "/run/a.sock"),
            ("a.sock", "a.sock"),
            ("unix:/run/a.sock", "/run/a.sock"),
            ("unix:./10809", "./10809"),
            ("dir/with:10809", "dir/with:10809"),
            ("tcp:127.0.0.1:10809", "tcp:127.0.0.1:10809"),
            ("tcp:[::1]:0", "tcp:[::1]:0"),
            ("tcp:localhost:10809", "tcp:127.0.0.1:10809"),
        ] {
            let place: NbdPlace = text.parse().expect(text);
            assert_eq!(place.to_string(), form);
        }
    }

    /// The story: `unix:tcp:1`, a socket of that name, was taken for a TCP address from then on.
    #[test]
    fn place_is_read_as_the_one_that_was_written() {
        for text in
            ["unix:10809", "unix:tcp:1", "unix:unix:a", "unix:a://b", "a.sock", "tcp:[::1]:0"]
        {
            let place: NbdPlace = text.parse().expect(text);
            let written = serde_json::to_string(&place).expect("text");
            assert_eq!(serde_json::from_str::<NbdPlace>(&written).expect(text), place, "{written}");
        }
        let here = NbdPlace::Unix("10809".into()).resolved(Path::new("/run"));
        assert_eq!(serde_json::to_value(&here).expect("text"), "/run/10809");
    }

    /// The story: `--nbd :10809` made a socket of that name in the working directory.
    #[test]
    fn what_others_mean_by_an_address_is_refused_with_the_form_to_use() {
        for (text, form) in [
            (":10809", "tcp:127.0.0.1:10809"),
            ("10809", "tcp:127.0.0.1:10809"),
            ("127.0.0.1:10809", "tcp:127.0.0.1:10809"),
            ("0.0.0.0:10809", "tcp:0.0.0.0:10809"),
            ("[::1]:10809", "tcp:[::1]:10809"),
            ("localhost:10809", "tcp:localhost:10809"),
            ("tcp:10809", "tcp:127.0.0.1:10809"),
            ("tcp::10809", "tcp:127.0.0.1:10809"),
            ("tcp:localhost", "tcp:HOST:PORT"),
            ("nbd://localhost", "tcp:localhost:10809"),
            ("nbd://[::1]:1234/x", "tcp:[::1]:1234"),
            ("nbds:///", "tcp:127.0.0.1:10809"),
            ("nbd+unix:///x?socket=/run/s", "unix:/run/s"),
            ("nbd+unix:///", "unix:PATH"),
            ("http://a", "unix:PATH or tcp:"),
            ("unix:", "unix:PATH"),
            ("", "write a path"),
        ] {
            let error = text.parse::<NbdPlace>().expect_err(text).to_string();
            assert!(error.contains(form) && error.contains(&format!("nbd {text:?}")), "{error}");
        }
    }
}
