//! Headers that belong to one connection only, the gateway's own headers, and CORS.

use http::{
    header::{self, HeaderName},
    HeaderMap, HeaderValue, Method, StatusCode,
};

use super::{
    reply::{self, Reply},
    token,
};

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Removes what holds between two neighbours only (RFC 9110, 7.6.1).
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    let trailers = headers.get(header::TE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"trailers"));
    for name in [
        header::CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        header::TE,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
    ] {
        headers.remove(name);
    }
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// The protocol that a request or an answer of HTTP/1.1 wants to change to.
pub fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|name| name.trim().eq_ignore_ascii_case("upgrade"));
    headers.get(header::UPGRADE).filter(|_| asked).cloned()
}

pub fn set_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

/// Removes the sandbox's token from a request to a user's port: what listens there has no need to know it.
pub fn strip_token(headers: &mut HeaderMap) {
    for name in token::HEADERS {
        headers.remove(name);
    }
    if token::bearer(headers).is_some() {
        headers.remove(header::AUTHORIZATION);
    }
}

/// Answers a browser's preflight, which never carries a token.
pub fn preflight(method: &Method, headers: &HeaderMap) -> Option<Reply> {
    if method != Method::OPTIONS || !headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD) {
        return None;
    }
    let mut reply = reply::empty(StatusCode::NO_CONTENT);
    let answer = reply.headers_mut();
    allow_origin(answer);
    answer.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("HEAD, GET, POST, PUT, PATCH, DELETE, OPTIONS"),
    );
    // A `*` would not cover Authorization.
    let asked = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or_else(|| HeaderValue::from_static("*")));
    answer.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("7200"));
    answer.insert(header::VARY, HeaderValue::from_static("access-control-request-headers"));
    Some(reply)
}

/// Any page may read what its token opens: there are no cookies that a page could abuse.
pub fn allow_origin(headers: &mut HeaderMap) {
    headers.entry(header::ACCESS_CONTROL_ALLOW_ORIGIN).or_insert(HeaderValue::from_static("*"));
    headers.entry(header::ACCESS_CONTROL_EXPOSE_HEADERS).or_insert(HeaderValue::from_static("*"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_end_to_end_headers_stay() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-private"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("authorization", "Basic dXNlcjo="),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        assert_eq!(upgrade(&headers), None);
        strip_hop_by_hop(&mut headers);
        strip_token(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["authorization", "te"]);
    }

    #[test]
    fn upgrades() {
        let mut headers = HeaderMap::new();
        set_upgrade(&mut headers, HeaderValue::from_static("websocket"));
        assert_eq!(upgrade(&headers), Some(HeaderValue::from_static("websocket")));
    }
}
