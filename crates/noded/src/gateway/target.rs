//! Which sandbox and port a request is for.

use http::{header, request::Parts, HeaderMap};
use sandmill_wire::ApiError;

/// The port that means sandboxd itself.
pub const SANDBOXD_PORT: u16 = 49983;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub id: String,
    pub port: u16,
}

/// By header `E2b-Sandbox-Id`, else by host name; `None` when the request names no sandbox at all.
///
/// `domain` is what host names must end in; empty: any. Errors: 400 `invalid_argument`.
pub fn of(request: &Parts, domain: &str) -> Result<Option<Target>, ApiError> {
    if let Some(id) = text(&request.headers, "e2b-sandbox-id") {
        if !is_id(id) {
            return Err(ApiError::new(400, "invalid_argument", "E2b-Sandbox-Id is not the id of a sandbox"));
        }
        let port = match text(&request.headers, "e2b-sandbox-port") {
            None => SANDBOXD_PORT,
            Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(|| {
                ApiError::new(400, "invalid_argument", "E2b-Sandbox-Port is not a port").hint("1 to 65535")
            })?,
        };
        return Ok(Some(Target { id: id.to_owned(), port }));
    }
    // HTTP/2 has the host in the URI's authority.
    let host = request.uri.host().or_else(|| text(&request.headers, header::HOST.as_str()));
    Ok(host.and_then(|host| by_host(host, domain)))
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("\u{fffd}"))
}

fn by_host(host: &str, domain: &str) -> Option<Target> {
    let (label, rest) = host.split_once('.')?;
    let rest = rest.rsplit_once(':').map_or(rest, |(name, _port)| name);
    if !domain.is_empty() && !rest.eq_ignore_ascii_case(domain) {
        return None;
    }
    let (port, id) = label.split_once('-')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    // Host names have no case.
    let id = id.to_ascii_lowercase();
    is_id(&id).then_some(Target { id, port })
}

/// A plausible id: whether it exists, the directory says.
fn is_id(id: &str) -> bool {
    (1..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(uri: &str, headers: &[(&str, &str)], domain: &str) -> Result<Option<Target>, ApiError> {
        let mut request = http::Request::get(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        of(&request.body(()).unwrap().into_parts().0, domain)
    }

    fn some(id: &str, port: u16) -> Option<Target> {
        Some(Target { id: id.to_owned(), port })
    }

    #[test]
    fn headers_come_before_the_host() {
        let named = [("e2b-sandbox-id", "iabc"), ("host", "80-iother.d.e")];
        assert_eq!(target("/x", &named, "d.e").unwrap(), some("iabc", SANDBOXD_PORT));
        let with_port = [("e2b-sandbox-id", "iabc"), ("e2b-sandbox-port", "3000")];
        assert_eq!(target("/x", &with_port, "").unwrap(), some("iabc", 3000));
    }

    #[test]
    fn host_names() {
        assert_eq!(target("/", &[("host", "8080-iabc.d.e:49983")], "d.e").unwrap(), some("iabc", 8080));
        assert_eq!(target("http://8080-iabc.D.e/", &[], "d.E").unwrap(), some("iabc", 8080));
        assert_eq!(target("/", &[("host", "80-iabc.localhost")], "").unwrap(), some("iabc", 80));
        for other in ["localhost:49983", "80-iabc.other", "x-iabc.d.e", "0-iabc.d.e", "127.0.0.1"] {
            assert_eq!(target("/", &[("host", other)], "d.e").unwrap(), None, "{other}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(target("/", &[("e2b-sandbox-id", "../x")], "").is_err());
        assert!(target("/", &[("e2b-sandbox-id", "iabc"), ("e2b-sandbox-port", "0")], "").is_err());
        assert!(target("/", &[("e2b-sandbox-id", "iabc"), ("e2b-sandbox-port", "70000")], "").is_err());
    }
}
