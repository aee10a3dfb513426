//! Parts of a request that handlers take.
use crate::error::ApiError;
use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;

/// A path parameter. If it is invalid, the refusal has the common error format.
pub(crate) struct Path<T>(pub T);

impl<S: Send + Sync> FromRequestParts<S> for Path<String> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = axum::extract::Path::<String>::from_request_parts(parts, state).await;
        let bad = |_| {
            let message = format!("{} is not UTF-8 after percent-decoding", parts.uri.path());
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message)
        };
        path.map(|axum::extract::Path(name)| Path(name)).map_err(bad)
    }
}
