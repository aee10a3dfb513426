//! One format for all errors: OpenAI's.
//!
//! ```json
//! {"error": {"message": "…", "type": "invalid_request_error", "param": "top_p", "code": "invalid_value"}}
//! ```
use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use kvist_engine::Error;
use kvist_engine::chat_format::{AnswerSpecError, PromptError};
use kvist_engine::grammar::InvalidParameter;
use kvist_engine::serving::{Failure, Rejected};
use kvist_engine::sessions::SessionError;
use serde_json::{Value, json};
use std::time::Duration;

/// A request that is not ready (parsed, rendered, tokenized) within this time is refused.
pub(crate) const PREPARATION_TIME: Duration = Duration::from_secs(30);

/// A response that reports a refusal or a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The field of the request that caused the error, such as `messages[0].content`.
    pub param: Option<String>,
    /// For programs: `invalid_value`, `unsupported_parameter`, `context_length_exceeded`, …
    pub code: &'static str,
    /// Seconds after which a retry may succeed.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), param: None, code, retry_after_s: None }
    }

    /// 400: an invalid value of a field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message).about(param)
    }

    /// 400: a field, or a value of it, that kvist knows and does not support.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(param)
    }

    /// 400: prompt and answer do not fit into the context.
    pub fn too_long(param: &str, message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message).about(param)
    }

    /// 400: the model has no such token, although its tokenizer may.
    pub fn unknown_token(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message)
    }

    pub fn about(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after_s = Some(seconds);
        self
    }

    pub fn internal(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// 503: nothing can be computed until the server is started again.
    pub fn engine_failed(why: &str) -> Self {
        let message = format!("{why}: restart the server");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "engine_failed", message)
    }

    /// 503: the server is shutting down and does not accept the request, or cannot finish it.
    pub fn shutting_down(retry_after_s: u32) -> Self {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "the server is shutting down")
            .retry_after(retry_after_s)
    }

    /// 408: the deadline passed before the answer was complete.
    pub fn deadline() -> Self {
        let message = "the request's deadline passed before it was answered";
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "deadline_exceeded", message)
    }

    /// 408: the client has disconnected, or the request took too long to prepare.
    pub fn not_ready_in_time() -> Self {
        let message = format!(
            "the request could not be prepared within {} s: shorten it, or try again when the server is less busy",
            PREPARATION_TIME.as_secs()
        );
        ApiError { message, ..ApiError::deadline() }
    }

    /// 503: the memory for requests is taken.
    pub fn busy() -> Self {
        let message = "too many requests are being read or prepared: try again";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_busy", message).retry_after(1)
    }

    pub fn of_rejected(rejected: Rejected, retry_after_s: u32) -> Self {
        match rejected {
            Rejected::Full { .. } => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", rejected.to_string())
                    .retry_after(1)
            }
            Rejected::Draining => ApiError::shutting_down(retry_after_s),
        }
    }

    pub fn of_failure(failure: &Failure) -> Self {
        match failure {
            Failure::NeverFits { .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", failure.to_string())
            }
            Failure::UnknownToken { .. } => ApiError::unknown_token(failure.to_string()),
            Failure::Unread(_) => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "reads_too_slowly", failure.to_string())
            }
            Failure::Grammar(why) => ApiError::new(StatusCode::BAD_REQUEST, "grammar_failed", why.clone()),
            // A step computes many requests, so the message may be about another one.
            Failure::Engine(_) => ApiError::internal("the model failed; see the server's log"),
        }
    }

    /// OpenAI's error type for this status.
    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            408 => "timeout_error",
            409 => "conflict_error",
            424 => "service_unavailable_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The error as JSON, for bodies and event streams.
    pub fn to_json(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<InvalidParameter> for ApiError {
    fn from(bad: InvalidParameter) -> Self {
        match bad.halted {
            true => ApiError::not_ready_in_time(),
            false => ApiError::invalid(bad.param.clone(), bad.to_string()),
        }
    }
}

impl From<AnswerSpecError> for ApiError {
    fn from(error: AnswerSpecError) -> Self {
        match error {
            AnswerSpecError::Invalid(bad) => bad.into(),
            AnswerSpecError::Unsupported { param, message } => ApiError::unsupported(param, message),
        }
    }
}

impl From<PromptError> for ApiError {
    fn from(error: PromptError) -> Self {
        let message = error.to_string();
        match error {
            PromptError::NoTokenizer => ApiError::unsupported("prompt", message),
            PromptError::NoToolCalls { message: at } => {
                ApiError::unsupported(format!("messages[{at}]"), message)
            }
            PromptError::Template(Error::Halted) => ApiError::not_ready_in_time(),
            // A template may name what it refuses.
            PromptError::Template(Error::Usage(what)) => {
                ApiError::invalid(what.split('`').nth(1).unwrap_or("messages"), message)
            }
            PromptError::Template(_) => ApiError::invalid("messages", message),
        }
    }
}

impl From<SessionError> for ApiError {
    fn from(error: SessionError) -> Self {
        let message = error.to_string();
        let new = |status, code| ApiError::new(status, code, message.clone());
        match error {
            SessionError::NotFound { .. }
            | SessionError::Deleted { .. }
            | SessionError::LostRecord { .. }
            | SessionError::LongRecord { .. } => new(StatusCode::NOT_FOUND, "session_not_found"),
            // No 5xx: a router counts those against the worker, which answers everything else, and leaves it out after some.
            SessionError::Unreachable { .. } => {
                new(StatusCode::FAILED_DEPENDENCY, "session_store_unavailable").retry_after(1)
            }
            SessionError::DeletionsWait { .. } => {
                new(StatusCode::TOO_MANY_REQUESTS, "session_store_unavailable").retry_after(1)
            }
            SessionError::Exists { .. } => new(StatusCode::CONFLICT, "session_exists").about("id"),
            SessionError::Busy { .. } => new(StatusCode::CONFLICT, "session_busy"),
            SessionError::NotForked { .. } => new(StatusCode::CONFLICT, "not_a_fork"),
            SessionError::NotASibling { index, .. } => ApiError::invalid(format!("also[{index}]"), message),
            SessionError::TooManySessions { .. } | SessionError::TooManyTokens { .. } => {
                new(StatusCode::TOO_MANY_REQUESTS, "session_quota")
            }
            SessionError::NoSuchFile { .. } => new(StatusCode::NOT_FOUND, "file_not_found").about("file"),
            SessionError::TooManyFiles { .. } => new(StatusCode::TOO_MANY_REQUESTS, "session_quota"),
            SessionError::NotSaved { .. } => ApiError::internal(message),
            SessionError::InsideMessage => new(StatusCode::CONFLICT, "inside_message").about("messages"),
            SessionError::Invalid { param, .. } => ApiError::invalid(param, message),
            SessionError::TooLong { param, .. } => ApiError::too_long(&param, message),
            SessionError::Halted => ApiError::not_ready_in_time(),
            SessionError::Model(_) => ApiError::internal(message),
        }
    }
}

/// Header that is `false` if a retry would give the same error, even if the status suggests otherwise.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// `Retry-After` of a quota error, in seconds. When the quota has room again depends on its user.
const QUOTA_RETRY_S: u32 = 60;

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", self.status.as_u16(), self.code, self.message)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.to_json())).into_response();
        let headers = response.headers_mut();
        // Clients retry after a 429, and immediately if no time is given.
        let full = self.status == StatusCode::TOO_MANY_REQUESTS;
        if let Some(seconds) = self.retry_after_s.or(full.then_some(QUOTA_RETRY_S)) {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        // OpenAI's clients retry every 408 and 429, after the time that the response gives.
        if ["session_quota", "deadline_exceeded"].contains(&self.code) {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_engine::sessions::SessionId;

    /// Regression: the answer was 400, as if the schema were invalid.
    #[test]
    fn a_check_that_was_not_finished_refuses_no_schema() {
        let wrong = InvalidParameter::new("s", "is wrong".into());
        let aborted = InvalidParameter { halted: true, ..wrong.clone() };
        let answered = ApiError::from(aborted);
        assert_eq!((answered.status.as_u16(), answered.code), (408, "deadline_exceeded"), "{answered}");
        assert_eq!(ApiError::from(wrong).status.as_u16(), 400);
    }

    /// Regression: they were 503, and ten of those in a row made a router leave the worker out for all requests.
    #[test]
    fn a_store_that_does_not_answer_is_no_failure_of_the_worker() {
        let rows = [
            (SessionError::Unreachable { id: SessionId(7) }, 424, "service_unavailable_error"),
            (SessionError::DeletionsWait { waiting: 9 }, 429, "rate_limit_error"),
        ];
        for (error, status, kind) in rows {
            let error = ApiError::from(error);
            assert_eq!(
                (error.status.as_u16(), error.kind(), error.code),
                (status, kind, "session_store_unavailable")
            );
            let response = error.into_response();
            assert_eq!(response.headers()[RETRY_AFTER], "1");
            assert!(!response.headers().contains_key(SHOULD_RETRY), "a retry may succeed");
        }
    }

    /// A step computes many requests: the message of its failure must not reach each of them.
    #[test]
    fn failures_tell_what_their_request_caused_alone() {
        let of = |failure: Failure| {
            let error = ApiError::of_failure(&failure);
            (error.status.as_u16(), error.code, error.message)
        };
        let (status, code, message) = of(Failure::Engine("request 7: token 256".into()));
        assert_eq!((status, code), (500, "internal_error"));
        assert!(!message.contains('7') && !message.contains("256"), "{message}");
        assert_eq!(of(Failure::Grammar("too large".into())), (400, "grammar_failed", "too large".into()));
        let (status, code, _) = of(Failure::Unread(4096));
        assert_eq!((status, code), (503, "reads_too_slowly"));
        let (status, code, message) = of(Failure::UnknownToken { token: 256, vocab: 200 });
        assert_eq!((status, code), (400, "invalid_value"));
        assert!(message.contains("256") && message.contains("200"), "{message}");
    }
}
