//! Buckets, as the tools of AWS find them: by the environment.

use super::url::StoreUrl;
use mica_block::{Error, ErrorKind, ObjectName, Result};
use mica_s3::{Bucket, BucketOptions};
use std::path::{Component, Path, PathBuf};

/// Variables with the address of a service other than Amazon's, the first that counts first.
const ENDPOINTS: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
/// Variables with files that say who asks. What gives out such tokens replaces them from time to
/// time, and with some the folder that a link beside them names.
const TOKENS: [&str; 2] = ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"];
/// Variables with certificates to trust.
const CERTIFICATES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];
/// Where systems keep what is needed to find a service and to trust it. Never what is private:
/// `/etc/ssl` and `/etc/pki/tls` have keys, too.
const PLACES: [&str; 19] = [
    "/etc/ssl/certs",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/ca-trust",
    "/etc/pki/trust",
    "/etc/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/usr/share/pki",
    "/usr/lib/ssl/cert.pem",
    "/var/lib/ca-certificates",
    RESOLV_CONF,
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
];
/// Where names of hosts are looked up.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// A folder this deep is of one purpose, so that all in it may be read: `/run/systemd/resolve` is,
/// and `/run` and `/etc` are not. Neither is everything else that is shallow, except these.
const DEPTH_OF_ONE_PURPOSE: usize = 3;
const OF_ONE_PURPOSE: [&str; 3] = ["/run/NetworkManager", "/run/resolvconf", "/run/connman"];

/// The bucket at `url`.
pub(super) fn open(url: &StoreUrl, bucket: &str, folder: Option<&ObjectName>) -> Result<Bucket> {
    let endpoint = endpoint();
    if endpoint.is_none() && region().is_none() {
        let what = format!(
            "{url}: where is it? Set AWS_REGION, or AWS_ENDPOINT_URL for a service that is not \
             Amazon's"
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Bucket::open(BucketOptions {
        bucket: bucket.to_owned(),
        folder: folder.cloned(),
        endpoint,
        // Other services take any.
        region: region().or_else(|| Some("us-east-1".to_owned())),
        credentials: None,
    })
}

/// TCP ports that a process with a bucket connects to: the service's, those that say who asks, and
/// that of names.
pub fn bucket_ports() -> Vec<u16> {
    let port = endpoint().and_then(|endpoint| port_of(&endpoint));
    [80, 443, 53].into_iter().chain(port).collect()
}

/// Files that a process with a bucket reads, and folders of such.
///
/// A sandbox lets files be read that are there when it is entered, not names. A file that is
/// replaced is found again only where its folder may be read. So it is with what a daemon keeps
/// for names of hosts in a folder of its own, to which `/etc/resolv.conf` is a link, and with
/// tokens in a folder of theirs. Not with a plain `/etc/resolv.conf`: its folder has the secrets
/// of the system. Where that is replaced, and not written again in place, the server has to be
/// started again.
pub fn bucket_files() -> Vec<PathBuf> {
    let named = |names: &[&str]| -> Vec<_> {
        names.iter().filter_map(std::env::var_os).map(PathBuf::from).collect()
    };
    let tokens = named(&TOKENS);
    let replaced = tokens.iter().cloned().chain(PathBuf::from(RESOLV_CONF).canonicalize().ok());
    let folders: Vec<_> = replaced.filter_map(|file| folder_of_one_purpose(&file)).collect();
    let places = PLACES.iter().map(PathBuf::from);
    places.chain(named(&CERTIFICATES)).chain(tokens).chain(folders).collect()
}

/// The folder of `file`, if it has nothing else.
fn folder_of_one_purpose(file: &Path) -> Option<PathBuf> {
    let folder = file.parent()?;
    let parts = folder.components().filter(|part| matches!(part, Component::Normal(_)));
    let is_deep = folder.is_absolute() && parts.count() >= DEPTH_OF_ONE_PURPOSE;
    let is_known = OF_ONE_PURPOSE.iter().any(|known| folder == Path::new(known));
    (is_deep || is_known).then(|| folder.to_owned())
}

fn endpoint() -> Option<String> {
    ENDPOINTS.iter().find_map(|name| set(name))
}

fn region() -> Option<String> {
    ["AWS_REGION", "AWS_DEFAULT_REGION"].iter().find_map(|name| set(name))
}

/// A variable that is not empty.
fn set(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The port of a URL, if it names one.
fn port_of(url: &str) -> Option<u16> {
    let (_, rest) = url.split_once("://")?;
    let host = rest.split(['/', '?', '#']).next()?;
    // The colons of an IPv6 address are in brackets.
    let (_, port) = host.rsplit_once(':')?;
    port.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_is_what_follows_the_host() {
        assert_eq!(port_of("http://127.0.0.1:9000"), Some(9000));
        assert_eq!(port_of("https://[::1]:9000/path"), Some(9000));
        for url in ["https://s3.example.org", "https://[::1]", "http://host/a:1", "host:1"] {
            assert_eq!(port_of(url), None, "{url}");
        }
    }

    /// The story: the keys of every service of the machine could be read, and names could not be
    /// looked up any more once `/etc/resolv.conf` was replaced.
    #[test]
    fn folders_are_granted_only_where_nothing_else_is() {
        let secrets = ["/etc/ssl/private/key.pem", "/etc/pki/tls/private/key.pem", "/etc/shadow"];
        for granted in bucket_files() {
            let has = |secret: &&str| Path::new(secret).starts_with(&granted);
            assert!(!secrets.iter().any(has), "{granted:?}");
        }
        for (file, folder) in [
            ("/run/systemd/resolve/stub-resolv.conf", Some("/run/systemd/resolve")),
            ("/var/run/secrets/service/token", Some("/var/run/secrets/service")),
            ("/etc/resolv.conf", None),
            ("/run/NetworkManager/resolv.conf", Some("/run/NetworkManager")),
            ("/tmp/token", None),
            ("a/b/c/token", None),
        ] {
            assert_eq!(folder_of_one_purpose(Path::new(file)).as_deref(), folder.map(Path::new));
        }
    }
}
