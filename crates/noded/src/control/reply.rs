//! Answers and errors as JSON.

use bytes::Bytes;
use http::{header::CONTENT_TYPE, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use sandmill_wire::ApiError;
use serde::Serialize;

pub type Reply = Response<Full<Bytes>>;

pub fn json(status: StatusCode, value: &impl Serialize) -> Reply {
    let Ok(text) = serde_json::to_vec(value) else {
        return error(&ApiError::new(500, "internal", "an answer could not be written as JSON"));
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub fn nothing() -> Reply {
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

pub fn error(error: &ApiError) -> Reply {
    json(StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), error)
}
