//! The control API's calls on images; see `docs/reference/protocols.md` section 2.

use std::path::PathBuf;

use bytes::Bytes;
use http::{header::CONTENT_TYPE, HeaderValue, Method, Response, StatusCode};
use http_body_util::Full;
use sandmill_wire::ApiError;
use serde::Deserialize;

use super::{gc, layers::to_json, registry::Credentials, source::Format, Store};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Import {
    path: PathBuf,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    format: Format,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pull {
    name: String,
    #[serde(default)]
    credentials: Option<Credentials>,
    /// Ask the registry also when the image is there.
    #[serde(default)]
    newest: bool,
}

/// Answers `/v1/images` and everything below it. `path` is the request's path, still percent-encoded. The work runs on
/// a blocking thread and goes on to its end if the caller goes away.
pub async fn handle(store: Store, method: Method, path: String, body: Bytes) -> Response<Full<Bytes>> {
    if (&method, path.as_str()) == (&Method::POST, "/v1/images/pull") {
        return match pull(&store, &body).await {
            Ok(info) => json(StatusCode::OK, &info),
            Err(error) => refused(&error),
        };
    }
    let work = tokio::task::spawn_blocking(move || answer(&store, &method, &path, &body));
    match work.await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => refused(&error),
        Err(_) => {
            let error = ApiError::new(500, "internal", "the image store failed; noded's log says where");
            json(StatusCode::INTERNAL_SERVER_ERROR, &error)
        }
    }
}

async fn pull(store: &Store, body: &[u8]) -> Result<super::ImageInfo, ApiError> {
    let pull: Pull =
        parse(body, "a pull", r#"{"name": "…", "newest": false, "credentials": {"username", "password"}}"#)?;
    store.pull(&pull.name, pull.credentials, pull.newest).await
}

fn parse<T: serde::de::DeserializeOwned>(body: &[u8], what: &str, shape: &str) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        ApiError::new(400, "invalid_argument", format!("the body of {what}: {error}")).hint(format!("it is {shape}"))
    })
}

fn refused(error: &ApiError) -> Response<Full<Bytes>> {
    json(StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), error)
}

fn answer(store: &Store, method: &Method, path: &str, body: &[u8]) -> Result<Response<Full<Bytes>>, ApiError> {
    let rest = path.strip_prefix("/v1/images").unwrap_or(path);
    let name = decode(rest.strip_prefix('/').unwrap_or(rest))?;
    match (method, name.as_str()) {
        (&Method::GET, "") => Ok(json(StatusCode::OK, &serde_json::json!({"images": store.list()}))),
        (&Method::POST, "import") => {
            let shape = r#"{"path": "/abs/path", "name": "…", "format": "auto|oci|docker-archive|tar|dir"}"#;
            let import: Import = parse(body, "an import", shape)?;
            let info = store.import(&import.path, import.name.as_deref(), import.format)?;
            Ok(json(StatusCode::CREATED, &info))
        }
        (&Method::POST, "gc") => {
            let shape = r#"{"all", "imported", "dry_run": bool, "unused_for_s": float, "target_percent": float|null}"#;
            let request: gc::Request = parse(if body.is_empty() { b"{}" } else { body }, "a collection", shape)?;
            Ok(json(StatusCode::OK, &store.collect(&request)?))
        }
        (&Method::GET, name) => Ok(json(StatusCode::OK, &store.inspect(name)?)),
        (&Method::DELETE, name) if !name.is_empty() => {
            store.remove(name)?;
            let mut response = Response::new(Full::default());
            *response.status_mut() = StatusCode::NO_CONTENT;
            Ok(response)
        }
        _ => Err(ApiError::new(405, "method_not_allowed", format!("{method} {path} is not a call on images"))),
    }
}

fn json(status: StatusCode, value: &impl serde::Serialize) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(to_json(value))));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Undoes percent-encoding: names of images contain `/` and `:`.
fn decode(text: &str) -> Result<String, ApiError> {
    let bad = || ApiError::new(400, "invalid_argument", format!("{text:?} is not a well-formed path"));
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|byte| char::from(byte).to_digit(16)).ok_or_else(bad);
        let value = digit()? * 16 + digit()?;
        out.push(u8::try_from(value).map_err(|_| bad())?);
    }
    String::from_utf8(out).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn names_are_decoded() {
        assert_eq!(decode("ghcr.io%2Fa%2fb%3A1").unwrap(), "ghcr.io/a/b:1");
        assert_eq!(decode("a/b").unwrap(), "a/b");
        assert!(decode("%2").is_err());
        assert!(decode("%zz").is_err());
        assert!(decode("%ff").is_err());
    }
}
