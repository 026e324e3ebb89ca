//! `GET /sandmill/v1/attach`: the client's connection becomes sandboxd's own. After it the gateway is out of the way: no
//! copy, no hop, and noded's end does not end the connection.

use std::{io, os::fd::AsFd, time::Duration};

use http::{HeaderValue, Request, StatusCode, Version};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::{rt::TokioIo, server::conn::auto::upgrade::downcast};
use sandmill_wire::{ApiError, HANDOVER};
use tokio::{io::AsyncWriteExt as _, net::UnixStream, time::timeout};

use super::{
    client::Client,
    headers,
    pool::InUse,
    reply::{self, Reply},
    upstream, Route,
};
use crate::local_socket;

pub const PATH: &str = "/sandmill/v1/attach";
/// How long the 101 and the handover may take together.
const DEADLINE: Duration = Duration::from_secs(10);

/// Answers 101 and hands the connection over once that answer is written.
///
/// Errors: 426 `upgrade_required`; 502 and 503 of a sandbox that can't be reached.
pub async fn accept(
    mut request: Request<Incoming>,
    id: String,
    route: &Route,
    in_use: InUse,
) -> Result<Reply, ApiError> {
    let asked =
        headers::upgrade(request.headers()).is_some_and(|name| name.as_bytes().eq_ignore_ascii_case(b"sandmill"));
    let upgrade = request.extensions_mut().remove::<OnUpgrade>();
    let (true, Version::HTTP_11, Some(upgrade)) = (asked, request.version(), upgrade) else {
        return Err(ApiError::new(426, "upgrade_required", "attach hands the whole connection over")
            .hint("send it over HTTP/1.1 with `Connection: upgrade` and `Upgrade: sandmill`"));
    };
    // Connected before the 101, so that a sandbox that can't be reached is answered as such.
    let sandboxd = upstream::connect(&route.socket).await?;
    tokio::spawn(async move {
        let _ = timeout(DEADLINE, when_upgraded(upgrade, sandboxd, &id)).await;
        drop(in_use);
    });
    let mut reply = reply::empty(StatusCode::SWITCHING_PROTOCOLS);
    headers::set_upgrade(reply.headers_mut(), HeaderValue::from_static("sandmill"));
    Ok(reply)
}

async fn when_upgraded(upgrade: OnUpgrade, sandboxd: UnixStream, id: &str) {
    // A client that left before its 101 needs nothing more.
    let Ok(upgraded) = upgrade.await else { return };
    let Ok(parts) = downcast::<TokioIo<Client>>(upgraded) else { return };
    let mut client = parts.io.into_inner().into_stream();
    if let Err(error) = hand_over(sandboxd, &client, &parts.read_buf).await {
        let error = ApiError::new(502, "sandbox_unreachable", format!("the handover to the sandbox failed: {error}"))
            .hint("it may just be ending; ask for the sandbox's state")
            .retryable();
        // From the 101 on the client speaks HTTP/1.1 with the sandbox: this is the answer to its next request.
        let _ = client.write_all(&reply::raw_error(&error, Some(id))).await;
        let _ = client.shutdown().await;
    }
}

/// Sends `HANDOVER`, the length of what was already read, those bytes, and the descriptor.
async fn hand_over(sandboxd: UnixStream, client: &impl AsFd, read: &[u8]) -> io::Result<()> {
    let length = u32::try_from(read.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let mut message = Vec::with_capacity(5 + read.len());
    message.push(HANDOVER);
    message.extend_from_slice(&length.to_be_bytes());
    message.extend_from_slice(read);
    local_socket::send_with(sandboxd, &message, client).await
}
