//! `multipart/form-data`, part by part, without holding more than one chunk of it.

use bytes::{Bytes, BytesMut};
use memchr::memmem;
use sandmill_wire::ApiError;

use crate::files::receive::Chunks;

/// Longest headers of one part.
const HEADERS_LIMIT_BYTES: usize = 16 << 10;

/// What a part's headers say.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub name: Option<String>,
    pub filename: Option<Vec<u8>>,
}

/// A body of parts.
pub struct Multipart<S> {
    source: S,
    /// CR LF and two hyphens, then the boundary.
    delimiter: Vec<u8>,
    buffer: BytesMut,
}

/// Where chunks come from.
pub trait Source {
    async fn next(&mut self) -> Result<Option<Bytes>, ApiError>;
}

impl Source for &mut Chunks {
    async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        Chunks::next(self).await
    }
}

/// The boundary that a content type names.
pub fn boundary(content_type: &str) -> Option<Vec<u8>> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().to_ascii_lowercase().starts_with("multipart/") {
        return None;
    }
    let boundary = parameter(parameters.as_bytes(), "boundary")?;
    (1..=70).contains(&boundary.len()).then_some(boundary)
}

impl<S: Source> Multipart<S> {
    pub fn new(source: S, boundary: &[u8]) -> Self {
        // The first delimiter has no line before it: with this it looks like the others.
        Self { source, delimiter: [b"\r\n--", boundary].concat(), buffer: BytesMut::from(&b"\r\n"[..]) }
    }

    /// Skips to the next part; None after the last one.
    ///
    /// Errors: 400 `invalid_request`, and those of the body.
    pub async fn next_part(&mut self) -> Result<Option<Part>, ApiError> {
        while self.chunk().await?.is_some() {}
        self.take(self.delimiter.len()).await?;
        let end = self.take(2).await?;
        if &end[..] == b"--" {
            return Ok(None);
        }
        // Blanks may stand between the boundary and the end of its line.
        let mut line = end;
        while !line.ends_with(b"\r\n") {
            if line.len() > HEADERS_LIMIT_BYTES {
                return Err(malformed("a boundary's line doesn't end"));
            }
            line.extend_from_slice(&self.take(1).await?);
        }
        let mut headers = BytesMut::new();
        while !(headers.ends_with(b"\r\n\r\n") || &headers[..] == b"\r\n") {
            if headers.len() > HEADERS_LIMIT_BYTES {
                return Err(malformed("a part's headers are too long"));
            }
            headers.extend_from_slice(&self.take(1).await?);
        }
        Ok(Some(parse_headers(&headers)))
    }

    /// The part's next bytes; None at its end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ApiError> {
        loop {
            match memmem::find(&self.buffer, &self.delimiter) {
                Some(0) => return Ok(None),
                Some(at) => return Ok(Some(self.buffer.split_to(at).freeze())),
                None => {}
            }
            // The end of what is there may be the beginning of a delimiter.
            let sure = match memchr::memrchr(b'\r', &self.buffer) {
                Some(at) if self.buffer.len() - at < self.delimiter.len() => at,
                _ => self.buffer.len(),
            };
            if sure > 0 {
                return Ok(Some(self.buffer.split_to(sure).freeze()));
            }
            self.more().await?;
        }
    }

    async fn more(&mut self) -> Result<(), ApiError> {
        match self.source.next().await? {
            Some(chunk) => self.buffer.extend_from_slice(&chunk),
            None => return Err(malformed("it ends before its last boundary")),
        }
        Ok(())
    }

    async fn take(&mut self, count: usize) -> Result<BytesMut, ApiError> {
        while self.buffer.len() < count {
            self.more().await?;
        }
        Ok(self.buffer.split_to(count))
    }
}

fn malformed(why: &str) -> ApiError {
    ApiError::new(400, "invalid_request", format!("the multipart body can't be read: {why}"))
}

fn parse_headers(headers: &[u8]) -> Part {
    let mut part = Part::default();
    for line in headers.split(|byte| *byte == b'\n') {
        let Some(colon) = memchr::memchr(b':', line) else { continue };
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        if name.trim_ascii().eq_ignore_ascii_case(b"content-disposition") {
            part.name = parameter(value, "name").map(|name| String::from_utf8_lossy(&name).into_owned());
            part.filename =
                parameter(value, "filename*").and_then(|value| extended(&value)).or(parameter(value, "filename"));
        }
    }
    part
}

/// The value of `wanted=…` among parameters split by `;`. In quotes, a backslash stands before a quote or a backslash, or
/// a quote, CR or LF is percent-encoded, as browsers and clients do.
fn parameter(mut text: &[u8], wanted: &str) -> Option<Vec<u8>> {
    while !text.is_empty() {
        let end = text.iter().position(|byte| matches!(byte, b'=' | b';')).unwrap_or(text.len());
        let name = text[..end].trim_ascii();
        let mut value = Vec::new();
        if text.get(end) == Some(&b'=') {
            text = text[end + 1..].trim_ascii_start();
            if text.first() == Some(&b'"') {
                (value, text) = quoted(&text[1..]);
            } else {
                let end = text.iter().position(|byte| *byte == b';').unwrap_or(text.len());
                value = text[..end].trim_ascii().to_vec();
                text = &text[end..];
            }
        } else {
            text = &text[end..];
        }
        if name.eq_ignore_ascii_case(wanted.as_bytes()) {
            return Some(value);
        }
        text = text.iter().position(|byte| *byte == b';').map_or(&[][..], |at| &text[at + 1..]);
    }
    None
}

fn quoted(text: &[u8]) -> (Vec<u8>, &[u8]) {
    let mut value = Vec::new();
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match (*byte, text.get(at + 1..at + 3)) {
            (b'"', _) => return (value, &text[at + 1..]),
            (b'\\', Some([next @ (b'"' | b'\\'), _])) => {
                value.push(*next);
                at += 1;
            }
            (b'%', Some(b"22")) => {
                value.push(b'"');
                at += 2;
            }
            (b'%', Some(b"0D" | b"0d")) => {
                value.push(b'\r');
                at += 2;
            }
            (b'%', Some(b"0A" | b"0a")) => {
                value.push(b'\n');
                at += 2;
            }
            (byte, _) => value.push(byte),
        }
        at += 1;
    }
    (value, &[])
}

/// RFC 5987: `UTF-8''percent-encoded`.
fn extended(value: &[u8]) -> Option<Vec<u8>> {
    let text = value.splitn(3, |byte| *byte == b'\'').nth(2)?;
    let mut decoded = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let hex = |index: usize| (*text.get(index)? as char).to_digit(16);
        match (text[at], hex(at + 1), hex(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, _, _) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Pieces(std::vec::IntoIter<Bytes>);

    impl Source for Pieces {
        async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
            Ok(self.0.next())
        }
    }

    async fn parts(body: &[u8], piece: usize) -> Result<Vec<(Option<Vec<u8>>, Vec<u8>)>, ApiError> {
        let pieces: Vec<Bytes> = body.chunks(piece).map(Bytes::copy_from_slice).collect();
        let mut multipart = Multipart::new(Pieces(pieces.into_iter()), b"XX");
        let mut found = Vec::new();
        while let Some(part) = multipart.next_part().await? {
            let mut data = Vec::new();
            while let Some(chunk) = multipart.chunk().await? {
                data.extend_from_slice(&chunk);
            }
            found.push((part.filename, data));
        }
        Ok(found)
    }

    #[tokio::test]
    async fn parts_are_found_wherever_the_chunks_end() {
        let body =
            b"--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a;b\"\r\nContent-Type: x/y\r\n\r\n\
            one\r\n-\r\n--X\r\n--XX \r\ncontent-disposition: form-data; filename=b\r\n\r\n\r\n--XX--\r\n";
        for piece in 1..body.len() {
            let found = parts(body, piece).await.unwrap();
            let expected =
                vec![(Some(b"a;b".to_vec()), b"one\r\n-\r\n--X".to_vec()), (Some(b"b".to_vec()), b"".to_vec())];
            assert_eq!(found, expected, "{piece}");
        }
    }

    #[tokio::test]
    async fn a_cut_body_is_an_error() {
        let body = b"--XX\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\none\r\n--X";
        assert_eq!(parts(body, 7).await.unwrap_err().code, "invalid_request");
        assert!(parts(b"--XX--", 100).await.unwrap().is_empty());
    }

    #[test]
    fn parameters_are_unquoted() {
        let value = |text: &str| parameter(text.as_bytes(), "filename").map(|value| String::from_utf8(value).unwrap());
        assert_eq!(value(r#"form-data; name="x"; filename="a\"b;c""#).as_deref(), Some("a\"b;c"));
        assert_eq!(value(r#"form-data; filename="a%22%0A%20""#).as_deref(), Some("a\"\n%20"));
        assert_eq!(value("form-data; filename=plain ; x=y").as_deref(), Some("plain"));
        assert_eq!(value(r#"form-data; name="filename=no""#), None);
        assert_eq!(value(r#"filename="/home/user/x"#).as_deref(), Some("/home/user/x"));
        assert_eq!(extended(b"UTF-8''%C3%A9").unwrap(), "\u{e9}".as_bytes());
        assert_eq!(boundary("multipart/form-data; boundary=\"a b\"").unwrap(), b"a b");
        assert_eq!(boundary("text/plain; boundary=x"), None);
    }
}
