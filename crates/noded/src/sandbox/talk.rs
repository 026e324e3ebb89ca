//! Questions to a sandboxd, over its socket, each with a deadline; and the tether, by which it notices our end.

use std::{io, os::fd::AsFd, path::Path, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use sandmill_wire::TETHER;
use serde::{de::DeserializeOwned, Deserialize};
use tokio::net::UnixStream;

use crate::local_socket;

/// `GET /sandmill/v1/activity`.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct Activity {
    pub idle_s: f64,
    pub running: u64,
}

/// `GET /sandmill/v1/usage`: what only the inside sees.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct Inside {
    pub cpu_s: f64,
    pub pids: u64,
    pub io_read_bytes: u64,
    pub io_write_bytes: u64,
    pub disk_bytes: u64,
}

/// Ties the sandboxd in `dir` to whoever holds the writing end of `pipe`: see `sandmill_wire::TETHER`.
pub async fn tie(dir: &Path, pipe: &impl AsFd, lease_s: f64, renewed_by_use: bool) -> io::Result<()> {
    let mut message = vec![TETHER, u8::from(renewed_by_use)];
    message.extend(lease_s.to_be_bytes());
    local_socket::send_with(connect(dir).await?, &message, pipe).await
}

const ANSWER_LIMIT_BYTES: usize = 64 << 10;

/// Asks `path` of the sandboxd in `dir`. None when it does not answer in time.
pub async fn ask<T: DeserializeOwned>(dir: &Path, path: &str, deadline: Duration) -> Option<T> {
    tokio::time::timeout(deadline, get(dir, path)).await.ok()?.ok()
}

async fn connect(dir: &Path) -> io::Result<UnixStream> {
    local_socket::connect(&dir.join("sandboxd.sock")).await
}

async fn get<T: DeserializeOwned>(dir: &Path, path: &str) -> io::Result<T> {
    let stream = connect(dir).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    let request = http::Request::get(path)
        .header(http::header::HOST, "sandbox")
        .header(http::header::CONTENT_TYPE, "application/json")
        .header(http::header::ACCEPT, "application/json")
        .body(Empty::<Bytes>::new())
        .map_err(io::Error::other)?;
    let answer = async {
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        let body = Limited::new(response.into_body(), ANSWER_LIMIT_BYTES).collect().await.map_err(io::Error::other)?;
        serde_json::from_slice(&body.to_bytes()).map_err(io::Error::other)
    };
    tokio::select! {
        answer = answer => answer,
        ended = connection => Err(ended.err().map_or(io::ErrorKind::UnexpectedEof.into(), io::Error::other)),
    }
}
