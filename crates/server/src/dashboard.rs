//! The dashboard page at `/`, embedded in the binary. It reads the event stream of [`crate::live`].
//!
//! The bundle is built from `/dashboard` and committed, so building the server needs no Node. The page loads nothing
//! from other origins, and its content security policy allows no script but its own.
use crate::error::ApiError;
use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Path, content type, bytes.
const FILES: &[(&str, &str, &[u8])] = &[
    ("", "text/html; charset=utf-8", include_bytes!("../dashboard/index.html")),
    ("assets/app.js", "text/javascript; charset=utf-8", include_bytes!("../dashboard/assets/app.js")),
    ("assets/index.css", "text/css; charset=utf-8", include_bytes!("../dashboard/assets/index.css")),
    ("favicon.svg", "image/svg+xml", include_bytes!("../dashboard/favicon.svg")),
    ("example.jsonl.gz", "application/gzip", include_bytes!("../dashboard/example.jsonl.gz")),
];

fn file(path: &str) -> Response {
    let Some((_, kind, bytes)) = FILES.iter().find(|(name, ..)| *name == path) else {
        let message = format!("there is no /{path}; see /openapi.json");
        return ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message).into_response();
    };
    let headers = [
        (header::CONTENT_TYPE, *kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::CACHE_CONTROL, "no-cache"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, *bytes).into_response()
}

pub(crate) async fn index() -> Response {
    file("")
}
pub(crate) async fn favicon() -> Response {
    file("favicon.svg")
}
pub(crate) async fn example() -> Response {
    file("example.jsonl.gz")
}
pub(crate) async fn asset(Path(name): Path<String>) -> Response {
    file(&format!("assets/{name}"))
}
