//! Which call is whose.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use sandmill_wire::ApiError;
use serde::{de::DeserializeOwned, Deserialize};
use serde_json::json;

use super::{
    reply::{self, Reply},
    Api, Stop,
};
use crate::{
    images,
    sandbox::{Cause, SandboxSpec},
};

/// Largest body of a call: a spec with a big environment, a renewal of some ten thousand leases.
const BODY_LIMIT_BYTES: usize = 4 << 20;
/// Longest wait of a poll for events.
const LONGEST_WAIT_S: f64 = 60.0;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Renewal {
    ttl_s: f64,
    #[serde(default)]
    renew_on_use: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Renewals {
    renew: BTreeMap<String, f64>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Shutdown {
    keep_sandboxes: bool,
}

pub async fn answer(api: Arc<Api>, request: Request<Incoming>) -> Reply {
    let (head, body) = request.into_parts();
    let body = match Limited::new(body, BODY_LIMIT_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(_) => {
            return reply::error(
                &ApiError::new(413, "request_too_large", "the request's body could not be read, or is over 4 MiB")
                    .hint("split the call"),
            )
        }
    };
    let path = head.uri.path().to_owned();
    let query = Query(head.uri.query().unwrap_or_default().to_owned());
    if path == "/v1/images" || path.starts_with("/v1/images/") {
        // Warm sandboxes hold images that nobody uses.
        if head.method == Method::DELETE || path.ends_with("/gc") {
            api.node.forget_warm().await;
        }
        return images::handle(api.store.clone(), head.method, path, body).await;
    }
    route(&api, &head.method, &path, &query, &body).await.unwrap_or_else(|error| reply::error(&error))
}

async fn route(api: &Api, method: &Method, path: &str, query: &Query, body: &Bytes) -> Result<Reply, ApiError> {
    let node = &api.node;
    let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
    if let (true, ["v1", "sandboxes", id, ..]) = (method != Method::DELETE, segments.as_slice()) {
        node.settle(id).await;
    }
    match (method.as_str(), segments.as_slice()) {
        ("GET", ["v1", "health"]) => Ok(reply::json(StatusCode::OK, &health(api))),
        ("GET", ["v1", "pulls"]) => Ok(reply::json(StatusCode::OK, &json!({ "pulls": api.store.pulling() }))),
        ("GET", ["v1", "doctor"]) => {
            let doctor = api.doctor.clone();
            let checks = tokio::task::spawn_blocking(move || doctor.examine())
                .await
                .map_err(|_| ApiError::new(500, "internal", "the examination failed; noded's log says where"))?;
            Ok(reply::json(StatusCode::OK, &json!({ "checks": checks })))
        }
        ("POST", ["v1", "sandboxes"]) => {
            let (info, created) = node.create(parse::<SandboxSpec>(body)?).await?;
            Ok(reply::json(if created { StatusCode::CREATED } else { StatusCode::OK }, &info))
        }
        ("GET", ["v1", "sandboxes"]) => {
            Ok(reply::json(StatusCode::OK, &json!({"sandboxes": node.list(), "ended": node.ended()})))
        }
        ("GET", ["v1", "sandboxes", id]) => Ok(reply::json(StatusCode::OK, &node.get(id)?)),
        ("DELETE", ["v1", "sandboxes", id]) => {
            let cause = match query.text("cause") {
                None => Cause::Killed,
                Some(name) => Cause::asked(name).ok_or_else(|| {
                    ApiError::new(400, "invalid_argument", format!("{name:?} is no cause of an end"))
                        .hint("killed or lease_expired")
                })?,
            };
            node.delete(id, cause).await?;
            Ok(reply::nothing())
        }
        ("POST", ["v1", "sandboxes", id, "lease"]) => {
            let renewal: Renewal = parse(body)?;
            Ok(reply::json(StatusCode::OK, &node.renew(id, renewal.ttl_s, renewal.renew_on_use)?))
        }
        ("POST", ["v1", "leases"]) => {
            let renewals: Renewals = parse(body)?;
            Ok(reply::json(StatusCode::OK, &json!({"gone": node.renew_many(&renewals.renew)?})))
        }
        ("GET", ["v1", "sandboxes", id, "usage"]) => Ok(reply::json(StatusCode::OK, &node.usage(id).await?)),
        ("POST", ["v1", "sandboxes", id, "commit"]) => {
            Ok(reply::json(StatusCode::CREATED, &node.commit(id, parse_or_default(body)?).await?))
        }
        ("GET", ["v1", "events"]) => {
            let wait_s = query.number("wait_s")?.unwrap_or(0.0).clamp(0.0, LONGEST_WAIT_S);
            let after = query.number("after")?.unwrap_or(0.0) as u64;
            let mut stopped = api.stop.subscribe();
            let (events, next) = tokio::select! {
                news = node.events().after(after, Duration::from_secs_f64(wait_s)) => news,
                // A poll must not hold up our end.
                () = async { drop(stopped.wait_for(Option::is_some).await) } => {
                    node.events().after(after, Duration::ZERO).await
                }
            };
            Ok(reply::json(StatusCode::OK, &json!({"events": events, "next": next})))
        }
        ("POST", ["v1", "shutdown"]) => {
            let shutdown: Shutdown = parse_or_default(body)?;
            api.stop.send_replace(Some(Stop { keep_sandboxes: shutdown.keep_sandboxes }));
            Ok(reply::json(StatusCode::OK, &json!({})))
        }
        _ => Err(ApiError::new(404, "unknown_call", format!("{method} {path} is no call of noded's control API"))
            .hint("docs/reference/protocols.md, section 2, lists them")),
    }
}

fn health(api: &Api) -> serde_json::Value {
    let node = &api.node;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "node_id": node.node_id(),
        "boot_id": node.boot_id(),
        "data_addr": api.data_addr.to_string(),
        "cgroup": node.cgroup_kind(),
        "sandboxes": node.count(),
        "warm": node.warm_count(),
    })
}

fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        ApiError::new(400, "invalid_argument", format!("the request's body: {error}"))
            .hint("docs/reference/protocols.md, section 2, shows its fields")
    })
}

fn parse_or_default<T: DeserializeOwned + Default>(body: &Bytes) -> Result<T, ApiError> {
    if body.is_empty() {
        return Ok(T::default());
    }
    parse(body)
}

/// The part of a URL after `?`; no value that we take needs decoding.
struct Query(String);

impl Query {
    fn text(&self, name: &str) -> Option<&str> {
        self.0.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    fn number(&self, name: &str) -> Result<Option<f64>, ApiError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() && number >= 0.0 => Ok(Some(number)),
            _ => Err(ApiError::new(400, "invalid_argument", format!("{name}={text:?} is not a number from 0 on"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Query;

    #[test]
    fn queries() {
        let query = Query("after=7&wait_s=1.5&bad=x".to_owned());
        assert_eq!(query.number("after").unwrap(), Some(7.0));
        assert_eq!(query.number("wait_s").unwrap(), Some(1.5));
        assert_eq!(query.number("none").unwrap(), None);
        assert!(query.number("bad").is_err());
        assert_eq!(query.text("bad"), Some("x"));
    }
}
