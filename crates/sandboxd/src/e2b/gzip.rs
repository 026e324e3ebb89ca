//! Content encodings of `/files`: uploads may be gzip, downloads are sent as they are.

use std::{io::Write as _, path::PathBuf};

use bytes::Bytes;
use flate2::write::GzDecoder;
use http::{header, HeaderMap};
use sandmill_wire::ApiError;

use crate::files::{failure::failed_io, receive::Sink, upload::Upload};

/// Whether a request's body is compressed. Errors: 400 `unsupported_encoding`.
pub fn is_zipped(headers: &HeaderMap) -> Result<bool, ApiError> {
    let Some(encoding) = headers.get(header::CONTENT_ENCODING) else { return Ok(false) };
    let encoding = encoding.to_str().unwrap_or("?").trim().to_ascii_lowercase();
    match encoding.as_str() {
        "" | "identity" => Ok(false),
        "gzip" => Ok(true),
        other => Err(ApiError::new(
            400,
            "unsupported_encoding",
            format!("unsupported Content-Encoding: {other}, supported: gzip, identity"),
        )),
    }
}

/// Whether the client takes an answer as it is; it does unless it says `identity;q=0`, or `*;q=0` and no word of identity.
pub fn accepts_identity(headers: &HeaderMap) -> bool {
    let (mut identity, mut any) = (None, None);
    let values = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    for item in values.flat_map(|value| value.split(',')) {
        let mut pieces = item.split(';').map(str::trim);
        let name = pieces.next().unwrap_or("").to_ascii_lowercase();
        let quality = pieces.find_map(|piece| piece.strip_prefix("q=")?.parse::<f32>().ok()).unwrap_or(1.0);
        match name.as_str() {
            "identity" => identity = Some(quality),
            "*" => any = Some(quality),
            _ => {}
        }
    }
    identity.or(any) != Some(0.0)
}

/// Unpacks what it gets into a file.
pub struct Unzip {
    decoder: GzDecoder<Contents>,
    path: PathBuf,
}

/// The file, as the decoder wants to write it.
struct Contents(Upload);

impl std::io::Write for Contents {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.0.file().write(data)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Unzip {
    pub fn new(upload: Upload, path: &std::path::Path) -> Self {
        Self { decoder: GzDecoder::new(Contents(upload)), path: path.to_owned() }
    }

    /// Errors: 400 `invalid_request` when the data ends early or isn't gzip.
    pub fn finish(self) -> Result<Upload, ApiError> {
        let Self { decoder, path } = self;
        decoder.finish().map(|contents| contents.0).map_err(|error| broken(&path, &error))
    }
}

impl Sink for Unzip {
    fn write(&mut self, chunks: &mut [Bytes]) -> Result<(), ApiError> {
        chunks.iter().try_for_each(|chunk| self.decoder.write_all(chunk)).map_err(|error| broken(&self.path, &error))
    }
}

fn broken(path: &std::path::Path, error: &std::io::Error) -> ApiError {
    match error.raw_os_error() {
        Some(_) => failed_io("write", path, error),
        None => ApiError::new(400, "invalid_request", format!("error decompressing request body: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn identity_is_fine_unless_refused() {
        let accepts = |text: &'static str| {
            accepts_identity(&HeaderMap::from_iter([(header::ACCEPT_ENCODING, HeaderValue::from_static(text))]))
        };
        assert!(accepts_identity(&HeaderMap::new()));
        assert!(accepts("gzip, deflate"));
        assert!(accepts("*;q=0, identity;q=0.5"));
        assert!(!accepts("gzip, identity;q=0"));
        assert!(!accepts("gzip;q=1, *;q=0"));
    }
}
