//! Sandmill's file calls: `/sandmill/v1/files`, `/sandmill/v1/fs`, `/sandmill/v1/tar`.

use std::rc::Rc;

use sandmill_wire::ApiError;

use crate::{
    app::App,
    server::{Format, Reply, Request},
};

/// Answers one file call.
pub async fn handle(_app: Rc<App>, request: Request) -> Reply {
    let error = ApiError::new(404, "unknown_call", format!("there is no call {}", request.uri().path()));
    Format::of(request.headers()).error(&error)
}
