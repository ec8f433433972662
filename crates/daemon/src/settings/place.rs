//! Where NBD clients connect, as people write it.
//!
//! Settings hold one form: the path of a unix socket, or `tcp:IP:PORT`. What users of other NBD
//! servers write becomes that, or is refused with the form that it has here: it must not become the
//! name of a socket by accident, nor a port that is open to others.

use mica_block::{Error, ErrorKind, Result};
use serde::{Deserializer, de};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;

/// The port of NBD.
const PORT: &str = "10809";
const LOOPBACK: &str = "127.0.0.1";

/// The one form of `text`.
///
/// # Errors
/// `Invalid` with the form to use.
pub(crate) fn nbd_place(text: &str) -> Result<String> {
    let invalid =
        |what: String| Err(Error::new(ErrorKind::Invalid, format!("nbd {text:?}: {what}")));
    if let Some((scheme, rest)) = text.split_once("://") {
        let form = form_of_uri(scheme, rest);
        return invalid(format!("a URI is for clients: to listen there, write {form}"));
    }
    if let Some(path) = text.strip_prefix("unix:") {
        return match path {
            "" => invalid("it names no socket: write unix:PATH".to_owned()),
            path => Ok(path.to_owned()),
        };
    }
    if let Some(address) = text.strip_prefix("tcp:") {
        return tcp(address).map(|address| format!("tcp:{address}")).or_else(invalid);
    }
    match host_and_port(text) {
        Some((host, port)) => invalid(format!(
            "this looks like a TCP address: write tcp:{host}:{port}, or unix:./{text} for a socket \
             of that name"
        )),
        None if text.is_empty() => invalid("it names no socket: write a path".to_owned()),
        None => Ok(text.to_owned()),
    }
}

/// The one form of `text`, as it is meant in `folder`.
///
/// # Errors
/// `Invalid` with the form to use.
pub fn nbd_place_in(folder: &Path, text: &str) -> Result<String> {
    let place = nbd_place(text)?;
    Ok(match place.starts_with("tcp:") {
        true => place,
        false => folder.join(place).display().to_string(),
    })
}

/// Reads a place, or a list of them.
pub(super) fn nbd_places<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Vec<String>, D::Error> {
    struct Places;
    impl<'de> de::Visitor<'de> for Places {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("the place of a socket, or a list of them")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<Self::Value, E> {
            Ok(vec![nbd_place(text).map_err(E::custom)?])
        }

        fn visit_seq<A: de::SeqAccess<'de>>(
            self,
            mut all: A,
        ) -> std::result::Result<Self::Value, A::Error> {
            let mut places = Vec::new();
            while let Some(text) = all.next_element::<String>()? {
                places.push(nbd_place(&text).map_err(de::Error::custom)?);
            }
            Ok(places)
        }
    }
    deserializer.deserialize_any(Places)
}

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
            assert_eq!(nbd_place(text).expect(text), form);
        }
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
            let error = nbd_place(text).expect_err(text).to_string();
            assert!(error.contains(form) && error.contains(&format!("nbd {text:?}")), "{error}");
        }
    }
}
