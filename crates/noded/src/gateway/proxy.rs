//! One request: who it is for, whether it may, and passing it on.

use std::sync::Arc;

use http::{header, request::Parts, uri::PathAndQuery, Method, Request, Response, StatusCode, Uri, Version};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use sandmill_wire::ApiError;
use tokio::io::copy_bidirectional;

use super::{
    attach, headers,
    pool::{InUse, Pool},
    reply::{self, Reply, ReplyBody},
    target::{self, Target, SANDBOXD_PORT},
    token,
    upstream::{self, Link, Passing, Upload},
    Route,
};

/// What all connections share.
pub struct Gateway {
    pub domain: String,
    pub pool: Pool,
}

/// Answers one request of a client.
pub async fn answer(gateway: Arc<Gateway>, request: Request<Incoming>) -> Reply {
    let (head, body) = request.into_parts();
    if let Some(reply) = headers::preflight(&head.method, &head.headers) {
        return reply;
    }
    let browser = head.headers.contains_key(header::ORIGIN);
    let target = match target::of(&head, &gateway.domain) {
        Ok(Some(target)) => target,
        Ok(None) => return without_sandbox(&head),
        Err(error) => return reply::error(&error, None),
    };
    let to_sandboxd = target.port == SANDBOXD_PORT;
    let mut reply = match forward(&gateway, &target, head, body).await {
        Ok(reply) => reply,
        Err(error) => reply::error(&error, Some(&target.id)),
    };
    // What a user's own server lets pages read is for that server to say.
    if browser && (to_sandboxd || matches!(reply.body(), ReplyBody::Full(_))) {
        headers::allow_origin(reply.headers_mut());
    }
    reply
}

fn without_sandbox(head: &Parts) -> Reply {
    if head.method == Method::GET && head.uri.path() == "/health" {
        return reply::empty(StatusCode::NO_CONTENT);
    }
    let error = ApiError::new(400, "sandbox_not_named", "the request does not say which sandbox it is for")
        .hint("send the header E2b-Sandbox-Id, or use the host name {port}-{id}.{domain}");
    reply::error(&error, None)
}

async fn forward(gateway: &Gateway, target: &Target, head: Parts, body: Incoming) -> Result<Reply, ApiError> {
    let directory = gateway.pool.directory();
    let route = directory.route(&target.id).ok_or_else(|| reply::gone(directory.ended(&target.id)))?;
    token::check(&head, target.port == SANDBOXD_PORT, &route.token)?;
    let in_use = gateway.pool.begin(&target.id)?;
    if target.port == SANDBOXD_PORT && head.uri.path() == attach::PATH {
        return attach::accept(Request::from_parts(head, body), target.id.clone(), &route, in_use).await;
    }
    let passed = pass(target, &route, head, body, in_use).await;
    // An ending sandbox breaks its connections off a moment before, or after, it is known to have ended.
    passed.map_err(|error| match error.code.as_str() {
        "sandbox_unreachable" | "sandbox_broke_off" if directory.route(&target.id).is_none() => {
            reply::gone(directory.ended(&target.id))
        }
        _ => error,
    })
}

async fn pass(
    target: &Target,
    route: &Route,
    mut head: Parts,
    body: Incoming,
    in_use: InUse,
) -> Result<Reply, ApiError> {
    let client_upgrade = head.extensions.remove::<OnUpgrade>();
    // HTTP/2 knows no such upgrade.
    let protocol = headers::upgrade(&head.headers).filter(|_| head.version == Version::HTTP_11);
    prepare(&mut head, target);
    if let Some(protocol) = &protocol {
        headers::set_upgrade(&mut head.headers, protocol.clone());
    }
    let (upload, uploaded) = Upload::new(body);
    let request = Request::from_parts(head, upload);
    let pooled = target.port == SANDBOXD_PORT;
    let (mut answer, link) = send(target, route, request, &in_use, pooled).await?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        return splice(answer, client_upgrade, link, in_use);
    }
    headers::strip_hop_by_hop(answer.headers_mut());
    let (head, body) = answer.into_parts();
    Ok(Response::from_parts(head, ReplyBody::Passing(Passing::new(body, link, in_use, &uploaded, pooled))))
}

/// Only sandboxd's connections are kept: it never ends an idle one, whereas a user's server may do so at any moment, and a
/// request that was lost to such an end could not be told from one that was carried out.
async fn send(
    target: &Target,
    route: &Route,
    mut request: Request<Upload>,
    in_use: &InUse,
    pooled: bool,
) -> Result<(Response<Incoming>, Link), ApiError> {
    if pooled {
        while let Some(mut link) = in_use.idle_link().await {
            match link.exchange(request).await {
                Ok(answer) => return Ok((answer, link)),
                Err(mut error) => match error.take_message() {
                    // It was not sent: that connection had ended.
                    Some(unsent) => request = unsent,
                    None => return Err(upstream::broken(error.error())),
                },
            }
        }
    }
    let mut link = match target.port {
        SANDBOXD_PORT => Link::to_sandboxd(&route.socket).await?,
        port => Link::to_port(&route.socket, port).await?,
    };
    match link.exchange(request).await {
        Ok(answer) => Ok((answer, link)),
        Err(error) => Err(upstream::broken(error.error())),
    }
}

/// Turns a client's request into one for HTTP/1.1 inside.
fn prepare(head: &mut Parts, target: &Target) {
    headers::strip_hop_by_hop(&mut head.headers);
    // Our own server says 100 as soon as the sandbox reads the body.
    head.headers.remove(header::EXPECT);
    if target.port != SANDBOXD_PORT {
        headers::strip_token(&mut head.headers);
    }
    if !head.headers.contains_key(header::HOST) {
        let host = head.uri.authority().and_then(|authority| authority.as_str().parse().ok());
        head.headers.insert(header::HOST, host.unwrap_or(http::HeaderValue::from_static("localhost")));
    }
    // HTTP/2 may send a cookie in pieces; HTTP/1.1 must not (RFC 9113, 8.2.3).
    if head.version == Version::HTTP_2 && head.headers.get_all(header::COOKIE).iter().nth(1).is_some() {
        let pieces: Vec<&[u8]> = head.headers.get_all(header::COOKIE).iter().map(|piece| piece.as_bytes()).collect();
        if let Ok(joined) = http::HeaderValue::from_bytes(&pieces.join(&b"; "[..])) {
            head.headers.insert(header::COOKIE, joined);
        }
    }
    let path = head.uri.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
    head.uri = Uri::from(path);
    head.version = Version::HTTP_11;
}

/// Joins the two halves of an upgraded connection until both have ended.
fn splice(answer: Response<Incoming>, client: Option<OnUpgrade>, link: Link, in_use: InUse) -> Result<Reply, ApiError> {
    let (Some(client), Some(protocol)) = (client, headers::upgrade(answer.headers())) else {
        return Err(ApiError::new(502, "upgrade_unexpected", "the sandbox changed protocols without being asked")
            .hint("that is a fault of the server inside"));
    };
    let (mut head, body) = answer.into_parts();
    headers::strip_hop_by_hop(&mut head.headers);
    headers::set_upgrade(&mut head.headers, protocol);
    let inside = hyper::upgrade::on(Response::from_parts(head.clone(), body));
    tokio::spawn(async move {
        let running = link.run();
        // An error means that one side has left: the other's end follows from the drops here.
        if let Ok((client, inside)) = tokio::try_join!(client, inside) {
            let _ = copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(inside)).await;
        }
        drop((running, in_use));
    });
    Ok(Response::from_parts(head, ReplyBody::Full(None)))
}
