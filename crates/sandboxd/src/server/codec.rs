//! MessagePack and JSON: the two encodings of Sandmill's own calls.

use base64::{engine::general_purpose::STANDARD, Engine as _};
use http::{header, HeaderMap, HeaderValue, StatusCode};
use sandmill_wire::ApiError;
use serde::{
    de::{self, DeserializeOwned},
    Deserializer, Serialize, Serializer,
};

use super::body::{collect, Reply, ReplyBody, Request};

/// Longest body of a call that isn't a stream: room for `stdin`, environments and long commands.
pub const BODY_LIMIT_BYTES: usize = 64 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    MessagePack,
    Json,
}

impl Format {
    /// The format of a request, which is that of its answer: JSON when the client says so, else MessagePack.
    pub fn of(headers: &HeaderMap) -> Self {
        let named = headers.get(header::CONTENT_TYPE).or_else(|| headers.get(header::ACCEPT));
        match named {
            Some(value) if value.as_bytes().starts_with(b"application/json") => Self::Json,
            _ => Self::MessagePack,
        }
    }

    fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::MessagePack => "application/msgpack",
            Self::Json => "application/json",
        })
    }

    /// Reads a call's body. Errors: 400 `invalid_request`, 413 `body_too_large`, 400 `body_incomplete`.
    pub async fn read<T: DeserializeOwned>(self, request: Request) -> Result<T, ApiError> {
        let bytes = collect(request.into_body(), BODY_LIMIT_BYTES).await?;
        self.parse(&bytes)
    }

    /// Errors: 400 `invalid_request`.
    pub fn parse<T: DeserializeOwned>(self, bytes: &[u8]) -> Result<T, ApiError> {
        // A call whose fields are all optional may come without a body.
        let parsed = match (self, bytes.is_empty()) {
            (Self::MessagePack, true) => rmp_serde::from_slice(&[0x80]).map_err(|error| error.to_string()),
            (Self::MessagePack, false) => rmp_serde::from_slice(bytes).map_err(|error| error.to_string()),
            (Self::Json, true) => serde_json::from_slice(b"{}").map_err(|error| error.to_string()),
            (Self::Json, false) => serde_json::from_slice(bytes).map_err(|error| error.to_string()),
        };
        parsed.map_err(|error| {
            ApiError::new(400, "invalid_request", format!("the request's body is not what this call takes: {error}"))
                .hint("see docs/reference/protocols.md, section 5")
        })
    }

    pub fn encode<T: Serialize>(self, value: &T) -> Vec<u8> {
        let encoded = match self {
            Self::MessagePack => rmp_serde::to_vec_named(value).map_err(|error| error.to_string()),
            Self::Json => serde_json::to_vec(value).map_err(|error| error.to_string()),
        };
        // Our own types serialize by construction; a failure is a bug of ours and is said as one.
        encoded.unwrap_or_else(|error| format!("{{\"code\":\"internal\",\"message\":\"{error}\"}}").into_bytes())
    }

    pub fn reply<T: Serialize>(self, value: &T) -> Reply {
        self.reply_with(StatusCode::OK, value)
    }

    pub fn error(self, error: &ApiError) -> Reply {
        self.reply_with(StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), error)
    }

    fn reply_with<T: Serialize>(self, status: StatusCode, value: &T) -> Reply {
        let mut reply = Reply::new(ReplyBody::full(self.encode(value)));
        *reply.status_mut() = status;
        reply.headers_mut().insert(header::CONTENT_TYPE, self.content_type());
        reply
    }
}

/// 204 without a body.
pub fn no_content() -> Reply {
    let mut reply = Reply::new(ReplyBody::empty());
    *reply.status_mut() = StatusCode::NO_CONTENT;
    reply
}

/// Bytes on the wire: binary in MessagePack (text is taken too), base64 in JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blob(pub Vec<u8>);

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.serialize_str(&STANDARD.encode(&self.0))
        } else {
            serializer.serialize_bytes(&self.0)
        }
    }
}

impl<'de> de::Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            let text = String::deserialize(deserializer)?;
            STANDARD.decode(text).map(Self).map_err(|error| de::Error::custom(format!("not base64: {error}")))
        } else {
            deserializer.deserialize_byte_buf(BlobVisitor)
        }
    }
}

struct BlobVisitor;

impl<'de> de::Visitor<'de> for BlobVisitor {
    type Value = Blob;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("bytes")
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Blob, E> {
        Ok(Blob(bytes.to_vec()))
    }

    fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Blob, E> {
        Ok(Blob(bytes))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Blob, E> {
        Ok(Blob(text.as_bytes().to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_both_formats() {
        let blob = Blob(vec![0, 0xff, b'a']);
        for format in [Format::MessagePack, Format::Json] {
            assert_eq!(format.parse::<Blob>(&format.encode(&blob)).unwrap(), blob);
        }
    }

    #[test]
    fn text_is_taken_for_bytes_in_messagepack() {
        let encoded = Format::MessagePack.encode(&"hello");
        assert_eq!(Format::MessagePack.parse::<Blob>(&encoded).unwrap().0, b"hello");
    }
}
