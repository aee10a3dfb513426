//! Parts of a request that handlers take.
use crate::auth::Caller;
use crate::body::json_body;
use crate::error::ApiError;
use crate::state::ServerState;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde_json::Value;
use std::sync::Arc;

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

/// A request of an authenticated client.
pub(crate) struct Call {
    pub state: Arc<ServerState>,
    pub caller: Caller,
}

impl FromRequestParts<Arc<ServerState>> for Call {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<ServerState>) -> Result<Self, ApiError> {
        let caller = parts.extensions.get::<Caller>().cloned();
        let caller = caller.ok_or_else(|| ApiError::internal("the request was not authenticated"))?;
        Ok(Call { state: state.clone(), caller })
    }
}

/// A request of an authenticated client, with its JSON body.
pub(crate) struct Posted {
    pub call: Call,
    pub body: Value,
}

impl FromRequest<Arc<ServerState>> for Posted {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<ServerState>) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let call = Call::from_request_parts(&mut parts, state).await?;
        let body = json_body(&call, &parts.headers, body).await?;
        Ok(Posted { call, body })
    }
}

impl Posted {
    /// [`ServerState::prepare`] with the body.
    pub async fn prepare<T: Send + 'static>(
        self,
        mut work: impl FnMut(&Arc<ServerState>, &Caller, &mut Value) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let Posted { call, mut body } = self;
        call.state.prepare(&call.caller, move |state, caller| work(state, caller, &mut body)).await
    }
}
