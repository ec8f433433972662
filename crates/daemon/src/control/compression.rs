//! Answers in gzip, for clients that take it: figures of a thousand disks shrink to a twentieth.

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write;

/// What is shorter is sent as it is: it is one packet anyhow.
const COMPRESSED_BYTES_MIN: usize = 1400;

/// Compresses the answer if the client takes that.
pub(super) async fn compress(request: Request, next: Next) -> Response {
    let is_wanted = takes_gzip(request.headers());
    let response = next.run(request).await;
    if !is_wanted {
        return response;
    }
    let (mut head, body) = response.into_parts();
    // It is in memory already.
    let bytes = match to_bytes(body, usize::MAX).await {
        Ok(bytes) if bytes.len() >= COMPRESSED_BYTES_MIN => bytes,
        Ok(bytes) => return Response::from_parts(head, Body::from(bytes)),
        Err(_) => return axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    };
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let compressed = encoder.write_all(&bytes).and_then(|()| encoder.finish());
    let Ok(compressed) = compressed else { return Response::from_parts(head, Body::from(bytes)) };
    let gzip = HeaderValue::from_static("gzip");
    head.headers.insert(header::CONTENT_ENCODING, gzip);
    head.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(head, Body::from(compressed))
}

/// Whether a client takes gzip. One that says so with weights means one that is not zero.
fn takes_gzip(headers: &HeaderMap) -> bool {
    let named = headers.get_all(header::ACCEPT_ENCODING).into_iter();
    let named = named.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(','));
    named.map(str::trim).any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, "q=1"));
        let weight = weight.trim().strip_prefix("q=").and_then(|text| text.parse::<f32>().ok());
        name.trim().eq_ignore_ascii_case("gzip") && weight.is_some_and(|weight| weight > 0.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_for_those_who_name_it() {
        let takes = |value: &'static str| {
            let headers = [(header::ACCEPT_ENCODING, HeaderValue::from_static(value))];
            takes_gzip(&HeaderMap::from_iter(headers))
        };
        for value in ["gzip", "deflate, GZIP", "br;q=1, gzip; q=0.5"] {
            assert!(takes(value), "{value}");
        }
        for value in ["", "identity", "gzip;q=0", "gzip;q=0.0", "br", "gzipped"] {
            assert!(!takes(value), "{value}");
        }
        assert!(!takes_gzip(&HeaderMap::new()));
    }
}
