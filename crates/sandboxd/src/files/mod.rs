//! Sandmill's file calls: `/sandmill/v1/files`, `/sandmill/v1/fs`, `/sandmill/v1/tar`.
//!
//! They act as root of the sandbox; `user` says to whom new files belong and whose home `~` is. Nothing here waits for the
//! disk on the daemon's one thread (see [`pool`]), and nothing follows a link of /proc (`/proc/N/fd`, `/proc/N/root`).
//!
//! - [`path`], [`entry`], [`failure`], [`place`]: names, what is known of a file, errors, where a write goes.
//! - [`download`], [`upload`], [`receive`]: bytes out and in. [`archive`]: whole trees. [`operations`], [`listing`], [`tree`]: everything else.

mod archive;
pub mod attributes;
pub mod download;
pub mod entry;
pub mod failure;
pub mod listing;
pub mod operations;
pub mod path;
pub mod place;
pub mod pool;
pub mod receive;
#[cfg(test)]
mod scratch;
pub mod tree;
pub mod upload;

use std::{path::PathBuf, rc::Rc};

use http::{header, HeaderName, HeaderValue, Method, StatusCode};
use sandmill_wire::ApiError;

use self::{
    download::Download,
    entry::Entry,
    path::{Base, WirePath},
    place::Owner,
    receive::{Chunks, Writer},
    upload::{Upload, Wanted},
};
use crate::{
    app::App,
    proc::Account,
    server::{unknown_call, Format, Query, Reply, Request},
};

const STAT_HEADER: HeaderName = HeaderName::from_static("sandmill-stat");

/// Answers one file call.
pub async fn handle(app: Rc<App>, request: Request) -> Reply {
    let format = Format::of(request.headers());
    let answer = match (request.method(), request.uri().path()) {
        (&Method::GET, "/sandmill/v1/files") => get(&app, &request).await,
        (&Method::PUT, "/sandmill/v1/files") => put(&app, request, format).await,
        (&Method::POST, "/sandmill/v1/fs") => operate(&app, request, format).await,
        (&Method::GET, "/sandmill/v1/tar") => archive::down(&app, &request).await,
        (&Method::PUT, "/sandmill/v1/tar") => archive::up(&app, request, format).await,
        (method, path) => Err(unknown_call(method, path)),
    };
    answer.unwrap_or_else(|error| format.error(&error))
}

/// Whose files a call makes, and where its paths begin.
pub struct Actor {
    pub owner: Owner,
    pub base: Base,
}

impl Actor {
    /// Errors: 400 `user_not_found`.
    pub fn of(app: &App, user: Option<&str>) -> Result<Self, ApiError> {
        let user = user.filter(|user| !user.is_empty()).or(app.config.user.as_deref()).unwrap_or("root");
        let account = app.procs.accounts().resolve(user)?;
        let home = PathBuf::from(&account.home);
        let start = app.config.workdir.as_ref().map_or_else(|| home.clone(), PathBuf::from);
        Ok(Self { owner: owner(&account), base: Base { home, start } })
    }
}

pub fn owner(account: &Account) -> Owner {
    Owner { uid: account.uid, gid: account.gid }
}

/// The path and the user of a call that has them in its query.
fn named(app: &App, query: &Query) -> Result<(PathBuf, Actor), ApiError> {
    let actor = Actor::of(app, query.get("user"))?;
    let path = query
        .bytes("path")
        .ok_or_else(|| ApiError::new(400, "invalid_argument", "the query parameter path is missing"))?;
    Ok((WirePath::new(path).resolve(&actor.base)?, actor))
}

async fn get(app: &App, request: &Request) -> Result<Reply, ApiError> {
    let query = Query::of(request.uri());
    let (path, _) = named(app, &query)?;
    let (offset, length) = (query.number("offset")?.unwrap_or(0), query.number("length")?);
    let names = app.procs.accounts().names();
    let download = pool::short(move || Download::open(path, offset, length, names)).await??;
    let stat = ascii_json(&download.entry);
    let length = download.length();
    let mut reply = Reply::new(download.into_body());
    let headers = reply.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    if let Ok(stat) = HeaderValue::from_str(&stat) {
        headers.insert(STAT_HEADER, stat);
    }
    if let Some(length) = length {
        headers.insert(header::CONTENT_LENGTH, length.into());
    }
    Ok(reply)
}

/// JSON that a header can hold: everything beyond ASCII is escaped.
fn ascii_json(entry: &Entry) -> String {
    let json = serde_json::to_string(entry).unwrap_or_default();
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() && character != '\x7f' {
            text.push(character);
        } else {
            let mut units = [0; 2];
            character.encode_utf16(&mut units).iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
        }
    }
    text
}

async fn put(app: &App, request: Request, format: Format) -> Result<Reply, ApiError> {
    let query = Query::of(request.uri());
    let (path, actor) = named(app, &query)?;
    let mode = query.get("mode").map(operations::parse_mode).transpose()?;
    let wanted = Wanted { owner: actor.owner, mode, parents: query.flag("parents", true)? };
    let names = app.procs.accounts().names();
    let mut chunks = Chunks::new(request.into_body());
    let written = write(path.clone(), wanted, &mut chunks).await;
    if written.is_err() {
        chunks.drain().await;
    }
    let stat = written?;
    let mut reply = format.reply(&Entry::new(path, &stat, None, names));
    *reply.status_mut() = StatusCode::CREATED;
    Ok(reply)
}

async fn write(path: PathBuf, wanted: Wanted, chunks: &mut Chunks) -> Result<rustix::fs::Stat, ApiError> {
    let mut writer = Writer::new(pool::short(move || Upload::begin(&path, wanted)).await??);
    while let Some(chunk) = chunks.next().await? {
        writer.push(chunk).await?;
    }
    writer.finish(Upload::commit).await
}

async fn operate(app: &App, request: Request, format: Format) -> Result<Reply, ApiError> {
    let call: operations::Call = format.read(request).await?;
    let actor = Actor::of(app, call.user.as_deref())?;
    let path = call.path.resolve(&actor.base)?;
    let to_owner = call.owner.as_deref().map(|name| app.procs.accounts().resolve(name)).transpose()?;
    let operation = call.operation(|path| path.resolve(&actor.base), to_owner.as_ref().map(owner))?;
    let names = app.procs.accounts().names();
    let long = operation.is_long();
    let work = move || operation.run(&path, actor.owner, names);
    let answer = if long { pool::long(work).await? } else { pool::short(work).await? }?;
    Ok(format.reply(&answer))
}
