//! `/files`: contents of files, up and down.

use std::{collections::BTreeMap, os::fd::AsFd as _, path::PathBuf, sync::Arc};

use bytes::Bytes;
use http::{header, HeaderMap, HeaderValue, StatusCode};
use sandmill_wire::ApiError;
use serde::{Deserialize, Serialize};

use super::{
    filesystem::METADATA_PREFIX,
    gzip,
    multipart::{self, Multipart},
    state::Caller,
};
use crate::{
    app::App,
    files::{
        attributes,
        download::{open_regular, Download},
        failure::{failed, failed_io, shown},
        path, pool,
        receive::{Chunks, Writer},
        upload::{Upload, Wanted},
    },
    server::{collect, Query, Reply, ReplyBody, Request},
};

/// Headers that become attributes of the file.
const METADATA_HEADERS: &str = "x-metadata-";
/// What an inode's attributes may take in all, and the kernel's limit of one name.
const METADATA_LIMIT_BYTES: usize = 4096;
const METADATA_NAME_LIMIT_BYTES: usize = 255;
/// Longest body of a compose call.
const COMPOSE_LIMIT_BYTES: usize = 4 << 20;

/// A file that was written, as E2B's clients read it.
#[derive(Debug, Serialize)]
pub struct Written {
    path: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl Written {
    fn new(path: &std::path::Path, metadata: BTreeMap<String, String>) -> Self {
        let name = path.file_name().map(path::escaped).unwrap_or_default();
        Self { path: path::escaped(path.as_os_str()), name, kind: "file", metadata }
    }
}

/// `GET /files?path=&username=`, with one range if the client wants one.
pub async fn download(app: &App, request: &Request) -> Result<Reply, ApiError> {
    let query = Query::of(request.uri());
    let caller = Caller::named(app, query.get("username"))?;
    let path = caller.path(query.bytes("path").unwrap_or_default())?;
    if !gzip::accepts_identity(request.headers()) {
        return Err(ApiError::new(
            406,
            "not_acceptable",
            "files are sent as they are: supported encodings are identity",
        ));
    }
    let range = range(request.headers());
    let names = app.procs.accounts().names();
    let wanted = range.clone();
    let opened = pool::short(move || open_range(path, wanted, names));
    let (download, range, size) = opened.await??;
    let disposition = disposition(&path::escaped(download.entry.name()));
    let length = download.length();
    let mut reply = Reply::new(download.into_body());
    let headers = reply.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if let Ok(disposition) = HeaderValue::from_str(&disposition) {
        headers.insert(header::CONTENT_DISPOSITION, disposition);
    }
    if let Some(length) = length {
        headers.insert(header::CONTENT_LENGTH, length.into());
    }
    if let Some((first, last)) = range {
        if let Ok(value) = HeaderValue::from_str(&format!("bytes {first}-{last}/{size}")) {
            headers.insert(header::CONTENT_RANGE, value);
        }
        *reply.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(reply)
}

type Opened = (Download, Option<(u64, u64)>, u64);

fn open_range(path: PathBuf, range: Option<Range>, names: Arc<crate::proc::AccountNames>) -> Result<Opened, ApiError> {
    let Some(range) = range else {
        let download = Download::open(path, 0, None, names)?;
        let size = download.entry.size;
        return Ok((download, None, size));
    };
    let size = rustix::fs::fstat(open_regular(&path)?).map_err(|errno| failed("look up", &path, errno))?.st_size as u64;
    let (first, last) = range
        .within(size)
        .ok_or_else(|| ApiError::new(416, "range_not_satisfiable", format!("{} has {size} bytes", shown(&path))))?;
    Ok((Download::open(path, first, Some(last - first + 1), names)?, Some((first, last)), size))
}

/// One range of bytes; several at once are answered with the whole file, as HTTP allows.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Range {
    From(u64, Option<u64>),
    Last(u64),
}

impl Range {
    /// First and last byte in a file of `size` bytes.
    fn within(&self, size: u64) -> Option<(u64, u64)> {
        let end = size.checked_sub(1)?;
        match *self {
            Self::From(first, last) => (first <= end).then(|| (first, last.unwrap_or(end).min(end))),
            Self::Last(count) => (count > 0).then(|| (size.saturating_sub(count), end)),
        }
    }
}

fn range(headers: &HeaderMap) -> Option<Range> {
    if headers.contains_key(header::IF_RANGE) {
        return None;
    }
    let text = headers.get(header::RANGE)?.to_str().ok()?.strip_prefix("bytes=")?;
    let (first, last) = text.split_once('-')?;
    match (first.trim(), last.trim()) {
        ("", count) => Some(Range::Last(count.parse().ok()?)),
        (first, "") => Some(Range::From(first.parse().ok()?, None)),
        (first, last) => {
            let (first, last) = (first.parse().ok()?, last.parse().ok()?);
            (first <= last).then_some(Range::From(first, Some(last)))
        }
    }
}

fn disposition(name: &str) -> String {
    if name.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\') || byte == b' ') {
        return format!("inline; filename=\"{name}\"");
    }
    let encoded = name.bytes().fold(String::new(), |mut text, byte| {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            text.push(byte as char);
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
        text
    });
    format!("inline; filename*=UTF-8''{encoded}")
}

/// `POST /files`: one file as `application/octet-stream`, or any number of them as `multipart/form-data`.
pub async fn upload(app: &App, request: Request) -> Result<Reply, ApiError> {
    let query = Query::of(request.uri());
    let caller = Caller::named(app, query.get("username"))?;
    let given = query.bytes("path").map(<[u8]>::to_vec);
    let metadata = metadata(request.headers())?;
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    let boundary = multipart::boundary(content_type);
    let octets = content_type.split(';').next().unwrap_or("").trim().eq_ignore_ascii_case("application/octet-stream");
    let zipped = gzip::is_zipped(request.headers())?;
    let content_type = content_type.to_owned();
    let mut chunks = Chunks::new(request.into_body());
    let written = match boundary {
        Some(boundary) if !zipped => parts(&caller, &mut chunks, &boundary, given, &metadata).await,
        Some(_) => Err(invalid("a multipart body can't be compressed as a whole: send application/octet-stream")),
        None if octets => match given {
            Some(given) => whole(&caller, &mut chunks, given, metadata, zipped).await.map(|written| vec![written]),
            None => Err(invalid("path query parameter is required for raw body upload")),
        },
        None => Err(invalid(format!(
            "unsupported content type: {content_type}, expected multipart/form-data or application/octet-stream"
        ))),
    };
    if written.is_err() {
        chunks.drain().await;
    }
    json(&written?)
}

async fn whole(
    caller: &Caller,
    chunks: &mut Chunks,
    given: Vec<u8>,
    metadata: BTreeMap<String, String>,
    zipped: bool,
) -> Result<Written, ApiError> {
    let path = caller.path(given)?;
    let upload = begin(caller, &path).await?;
    if zipped {
        let mut writer = Writer::new(gzip::Unzip::new(upload, &path));
        while let Some(chunk) = chunks.next().await? {
            writer.push(chunk).await?;
        }
        return writer.finish(move |unzip| commit(unzip.finish()?, &path, metadata)).await;
    }
    let mut writer = Writer::new(upload);
    while let Some(chunk) = chunks.next().await? {
        writer.push(chunk).await?;
    }
    writer.finish(move |upload| commit(upload, &path, metadata)).await
}

async fn parts(
    caller: &Caller,
    chunks: &mut Chunks,
    boundary: &[u8],
    given: Option<Vec<u8>>,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<Written>, ApiError> {
    let mut multipart = Multipart::new(chunks, boundary);
    let mut written = Vec::new();
    let mut paths = Vec::new();
    while let Some(part) = multipart.next_part().await? {
        if part.name.as_deref() != Some("file") {
            continue;
        }
        let name = given.clone().or(part.filename).ok_or_else(|| invalid("a file's part has no filename"))?;
        let path = caller.path(name)?;
        if paths.contains(&path) {
            let message =
                format!("two files of one upload have the same path {}: only the first was written", shown(&path));
            return Err(invalid(message));
        }
        let mut writer = Writer::new(begin(caller, &path).await?);
        while let Some(chunk) = multipart.chunk().await? {
            writer.push(chunk).await?;
        }
        let (at, metadata) = (path.clone(), metadata.clone());
        written.push(writer.finish(move |upload| commit(upload, &at, metadata)).await?);
        paths.push(path);
    }
    Ok(written)
}

async fn begin(caller: &Caller, path: &std::path::Path) -> Result<Upload, ApiError> {
    let wanted = Wanted { owner: caller.owner(), mode: None, parents: true };
    let path = path.to_owned();
    pool::short(move || Upload::begin(&path, wanted)).await?
}

/// Puts the file in its place; its metadata is what this upload says, no older one.
fn commit(upload: Upload, path: &std::path::Path, metadata: BTreeMap<String, String>) -> Result<Written, ApiError> {
    match attributes::replace_texts(upload.file().as_fd(), METADATA_PREFIX, &metadata) {
        // A file system without attributes keeps the contents; the answer then shows no metadata.
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
        Err(errno) => return Err(failed("set the metadata of", path, errno)),
    }
    let kept = attributes::Of::File(upload.file().as_fd()).texts(METADATA_PREFIX);
    upload.commit()?;
    Ok(Written::new(path, kept))
}

/// Errors: 400 `invalid_argument` for what isn't printable ASCII, or is too long.
fn metadata(headers: &HeaderMap) -> Result<BTreeMap<String, String>, ApiError> {
    let mut metadata = BTreeMap::new();
    let mut size = 0;
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(METADATA_HEADERS).filter(|key| !key.is_empty()) else { continue };
        let printable = value.as_bytes().iter().all(|byte| (0x20..=0x7e).contains(byte));
        let Some(value) = value.to_str().ok().filter(|_| printable) else {
            return Err(invalid(format!("invalid metadata: the value of {key:?} is not printable ASCII")));
        };
        if METADATA_PREFIX.len() + key.len() > METADATA_NAME_LIMIT_BYTES {
            return Err(invalid(format!("invalid metadata: the key {key:?} is too long")));
        }
        if !metadata.contains_key(key) {
            size += METADATA_PREFIX.len() + key.len() + value.len();
            metadata.insert(key.to_owned(), value.to_owned());
        }
    }
    if size > METADATA_LIMIT_BYTES {
        return Err(invalid(format!(
            "invalid metadata: {size} bytes in all, at most {METADATA_LIMIT_BYTES} are possible"
        )));
    }
    Ok(metadata)
}

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(400, "invalid_argument", message)
}

#[derive(Debug, Deserialize)]
struct Compose {
    source_paths: Vec<String>,
    destination: String,
    username: Option<String>,
}

/// `POST /files/compose`: puts several files together to one, and removes them.
pub async fn compose(app: &App, request: Request) -> Result<Reply, ApiError> {
    let body = collect(request.into_body(), COMPOSE_LIMIT_BYTES).await?;
    let compose: Compose =
        serde_json::from_slice(&body).map_err(|error| invalid(format!("invalid request body: {error}")))?;
    if compose.source_paths.is_empty() || compose.destination.is_empty() {
        return Err(invalid("source_paths and destination must not be empty"));
    }
    let caller = Caller::named(app, compose.username.as_deref())?;
    let destination = caller.path(compose.destination)?;
    let sources = compose.source_paths.into_iter().map(|path| caller.path(path)).collect::<Result<Vec<_>, _>>()?;
    if sources.contains(&destination) {
        return Err(invalid("a source can't be the destination"));
    }
    let wanted = Wanted { owner: caller.owner(), mode: None, parents: true };
    let written = pool::long(move || {
        let opened = sources.iter().map(|path| open_regular(path)).collect::<Result<Vec<_>, _>>()?;
        let upload = Upload::begin(&destination, wanted)?;
        for (source, path) in opened.into_iter().zip(&sources) {
            // The standard library lets the kernel copy where it can.
            std::io::copy(&mut &source, &mut upload.file()).map_err(|error| failed_io("append", path, &error))?;
        }
        let written = commit(upload, &destination, BTreeMap::new())?;
        for path in &sources {
            // The new file is in place: a source that can't be removed doesn't undo that.
            let _ = std::fs::remove_file(path);
        }
        Ok::<_, ApiError>(written)
    });
    json(&written.await??)
}

fn json(value: &impl Serialize) -> Result<Reply, ApiError> {
    let body = serde_json::to_vec(value).map_err(|error| ApiError::new(500, "internal", error.to_string()))?;
    let mut reply = Reply::new(ReplyBody::full(Bytes::from(body)));
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range_of(text: &'static str) -> Option<Range> {
        range(&HeaderMap::from_iter([(header::RANGE, HeaderValue::from_static(text))]))
    }

    #[test]
    fn ranges_are_read() {
        assert_eq!(range_of("bytes=2-5").unwrap().within(10), Some((2, 5)));
        assert_eq!(range_of("bytes=2-").unwrap().within(10), Some((2, 9)));
        assert_eq!(range_of("bytes=-3").unwrap().within(10), Some((7, 9)));
        assert_eq!(range_of("bytes=9-20").unwrap().within(10), Some((9, 9)));
        assert_eq!(range_of("bytes=10-").unwrap().within(10), None);
        assert_eq!(range_of("bytes=0-").unwrap().within(0), None);
        for other in ["bytes=5-2", "bytes=1-2,4-5", "lines=1-2", "bytes=x-"] {
            assert_eq!(range_of(other), None, "{other}");
        }
    }

    #[test]
    fn names_are_safe_in_a_header() {
        assert_eq!(disposition("a b.txt"), "inline; filename=\"a b.txt\"");
        assert_eq!(disposition("\u{e9}\"\n"), "inline; filename*=UTF-8''%C3%A9%22%0A");
    }

    #[test]
    fn metadata_comes_from_headers() {
        let headers = |value: &'static [u8]| {
            HeaderMap::from_iter([
                (header::HeaderName::from_static("x-metadata-author"), HeaderValue::from_bytes(value).unwrap()),
                (header::HOST, HeaderValue::from_static("x")),
            ])
        };
        assert_eq!(metadata(&headers(b"mish")).unwrap(), BTreeMap::from([("author".into(), "mish".into())]));
        assert_eq!(metadata(&headers(b"\xc3\xa9")).unwrap_err().code, "invalid_argument");
    }
}
