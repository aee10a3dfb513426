//! The server over real connections: answers, streams, errors, limits, keys, and disconnecting clients.
mod answers;
mod bodies;
mod capacity;
mod costly;
mod doors;
mod failures;
mod harmony;
mod kept;
mod limits;
mod live;
mod refusals;
mod retention;
mod scores;
mod server;
mod speculation;
mod tools;
mod words;
