//! `GET tcp/{port}` with `Upgrade: tcp`: raw bytes to what listens inside.

use std::time::Duration;

use http::{header, HeaderValue, Method, StatusCode};
use hyper_util::rt::TokioIo;
use sandmill_wire::ApiError;
use tokio::{io::copy_bidirectional, net::TcpStream, time::timeout};

use crate::server::{unknown_call, Reply, ReplyBody, Request};

/// Loopback answers at once; only a full accept queue makes a connect wait.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// Connects to 127.0.0.1, then ::1, and passes bytes both ways until both sides have ended.
///
/// Errors: 400 `invalid_argument`; 426 `upgrade_required`; 502 `port_not_open` when nothing listens.
pub async fn handle(request: Request, port: &str) -> Result<Reply, ApiError> {
    if request.method() != Method::GET {
        return Err(unknown_call(request.method(), request.uri().path()));
    }
    let port: u16 = port.parse().ok().filter(|port| *port != 0).ok_or_else(|| {
        ApiError::new(400, "invalid_argument", format!("{port} is not a port")).hint("they go from 1 to 65535")
    })?;
    let wanted =
        request.headers().get(header::UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"tcp"));
    if !wanted {
        return Err(ApiError::new(426, "upgrade_required", "this call is a tunnel")
            .hint("send `Connection: upgrade` and `Upgrade: tcp`"));
    }
    let mut inside = connect(port).await?;
    tokio::task::spawn_local(async move {
        // An error is the client leaving before its upgrade, or either side's end: there is nobody to tell.
        if let Ok(client) = hyper::upgrade::on(request).await {
            let _ = copy_bidirectional(&mut TokioIo::new(client), &mut inside).await;
        }
    });
    let mut reply = Reply::new(ReplyBody::empty());
    *reply.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    reply.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("tcp"));
    Ok(reply)
}

async fn connect(port: u16) -> Result<TcpStream, ApiError> {
    let mut last = None;
    for host in ["127.0.0.1", "::1"] {
        match timeout(CONNECT_DEADLINE, TcpStream::connect((host, port))).await {
            Ok(Ok(stream)) => {
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => last = Some(error.to_string()),
            Err(_) => last = Some("its accept queue is full".to_owned()),
        }
    }
    let why = last.unwrap_or_default();
    Err(ApiError::new(502, "port_not_open", format!("nothing answers on port {port} inside the sandbox: {why}"))
        .hint("start the server first; it must listen on 127.0.0.1 or on all addresses")
        .retryable())
}
