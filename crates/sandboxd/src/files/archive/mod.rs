//! Whole trees down and up, as tar streams: `/sandmill/v1/tar`.
//!
//! The `tar` crate knows the format (ustar, pax, GNU); what is read and made in the file system, and how, is ours: the
//! crate's own unpacking goes by path names.

mod bridge;
mod pack;
#[cfg(test)]
mod tests;
mod unpack;

use http::{header, HeaderValue};
use rustix::fd::OwnedFd;
use sandmill_wire::ApiError;
use tokio::{runtime::Handle, sync::mpsc};

use self::{
    bridge::{Inlet, Outlet},
    unpack::Owners,
};
use super::{
    entry::{open_directory, Kind},
    failure::failed,
    named,
    place::{make_directories, without_slashes, Parents, Place},
    pool,
    receive::Chunks,
};
use crate::{
    app::App,
    server::{Format, Query, Reply, ReplyBody, Request},
};

/// Chunks between the connection and the thread.
const AHEAD: usize = 4;

/// `GET tar?path=&user=`
pub async fn down(app: &App, request: &Request) -> Result<Reply, ApiError> {
    let (path, _) = named(app, &Query::of(request.uri()))?;
    let names = app.procs.accounts().names();
    let place = pool::short(move || open(&path)).await??;
    let (sender, body) = ReplyBody::channel(AHEAD);
    let runtime = Handle::current();
    pool::transfer(move || {
        let mut outlet = Outlet::new(sender.clone(), runtime.clone());
        let packed = pack::pack(&place, names, &mut outlet).map(drop);
        let flushed = packed.and_then(|()| std::io::Write::flush(&mut outlet));
        if let Err(error) = flushed {
            outlet.fail(error);
        }
    })
    .await?;
    let mut reply = Reply::new(body);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar"));
    Ok(reply)
}

/// What is to be packed: a link at the end of the path is followed, as it is for a list.
fn open(path: &std::path::Path) -> Result<Place, ApiError> {
    let path = without_slashes(path);
    if path.as_os_str().is_empty() {
        let directory = open_directory(rustix::fs::CWD, "/", true).map_err(|errno| failed("read", &path, errno))?;
        return Ok(Place { directory, name: ".".into() });
    }
    let place = Place::of(&path, Parents::MustExist)?;
    let stat = rustix::fs::statat(&place.directory, &place.name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|errno| failed("read", &path, errno))?;
    match Kind::of(&stat) {
        Kind::File | Kind::Directory => Ok(place),
        kind => Err(super::failure::not_regular(&path, kind.name())),
    }
}

/// `PUT tar?path=&user=&owners=keep`
pub async fn up(app: &App, request: Request, format: Format) -> Result<Reply, ApiError> {
    let query = Query::of(request.uri());
    let (path, actor) = named(app, &query)?;
    let owners = match query.get("owners") {
        None | Some("user") => Owners::Caller,
        Some("keep") => Owners::Kept,
        Some(other) => {
            return Err(ApiError::new(400, "invalid_argument", format!("owners is {other:?}, not user or keep")))
        }
    };
    let mut chunks = Chunks::new(request.into_body());
    let (sender, receiver) = mpsc::channel(AHEAD);
    let owner = actor.owner;
    let done = pool::transfer(move || {
        let root = target(&path, owner)?;
        unpack::unpack(Inlet::new(receiver), root, &path, owner, owners)
    })
    .await?;
    let fed = async {
        while let Some(chunk) = chunks.next().await? {
            if sender.send(chunk).await.is_err() {
                // The thread has ended: it says why.
                return Ok(());
            }
        }
        Ok(())
    };
    let fed: Result<(), ApiError> = fed.await;
    drop(sender);
    let unpacked = done.await.map_err(|_| ApiError::new(500, "internal", "unpacking failed inside the daemon"))?;
    // An archive that was cut off reads like one that ends: the body's error is the true one.
    fed?;
    if unpacked.is_err() {
        chunks.drain().await;
    }
    Ok(format.reply(&unpacked?))
}

fn target(path: &std::path::Path, owner: super::place::Owner) -> Result<OwnedFd, ApiError> {
    let refused = |errno| failed("unpack into", path, errno);
    let made = make_directories(None, path, owner, 0o755).map_err(refused)?;
    open_directory(&made.directory, ".", true).map_err(refused)
}
