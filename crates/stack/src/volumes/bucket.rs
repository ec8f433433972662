//! Buckets, as the tools of AWS find them: by the environment.

use super::url::StoreUrl;
use mica_block::{Error, ErrorKind, ObjectName, Result};
use mica_s3::{Bucket, BucketOptions};
use std::path::PathBuf;

/// Variables with the address of a service other than Amazon's, the first that counts first.
const ENDPOINTS: [&str; 2] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
/// Variables with files that say who asks.
const FILES: [&str; 3] =
    ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "SSL_CERT_FILE"];
/// Where systems keep what is needed to find a service and to trust it.
const PLACES: [&str; 12] = [
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/usr/lib/ssl",
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
];

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

/// Files that a process with a bucket reads.
pub fn bucket_files() -> Vec<PathBuf> {
    let named = FILES.iter().filter_map(std::env::var_os).map(PathBuf::from);
    PLACES.iter().map(PathBuf::from).chain(named).collect()
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
    use super::port_of;

    #[test]
    fn port_is_what_follows_the_host() {
        assert_eq!(port_of("http://127.0.0.1:9000"), Some(9000));
        assert_eq!(port_of("https://[::1]:9000/path"), Some(9000));
        for url in ["https://s3.example.org", "https://[::1]", "http://host/a:1", "host:1"] {
            assert_eq!(port_of(url), None, "{url}");
        }
    }
}
