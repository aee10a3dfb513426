//! The events of all generations of a request, merged into one stream.
//!
//! All answers to a prompt repeat its log-probabilities, but only the first one reports them. So where prompts are scored, the
//! events of the other answers wait until the first one's own token, or its end, has been received: by then all scores
//! of the prompt have been. Otherwise another answer's token could overtake scores that a slow client has not read yet.
use crate::error::ApiError;
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, SelectAll};
use kvist_engine::serving::Event;

/// An event of the answer with this index, or the error that ends the request.
pub(super) type Indexed = (usize, Result<Event, ApiError>);

/// The events of `prompts × n` answers, in the order in which they arrive.
pub(super) struct MergedEvents {
    running: SelectAll<BoxStream<'static, Indexed>>,
    /// Answers whose prompt is still being scored.
    held: Vec<(usize, BoxStream<'static, Indexed>)>,
    /// Of each prompt: not all of its scores may have been received yet.
    scoring: Vec<bool>,
    /// Number of answers to each prompt.
    n: usize,
}

impl MergedEvents {
    /// Without any answer yet. `scored`: the first answer to each prompt reports the prompt's log-probabilities.
    pub fn new(prompts: usize, n: usize, scored: bool) -> Self {
        MergedEvents { running: SelectAll::new(), held: Vec::new(), scoring: vec![scored; prompts], n }
    }

    /// Adds an answer.
    pub fn push(&mut self, index: usize, events: BoxStream<'static, Result<Event, ApiError>>) {
        let events = events.map(move |event| (index, event)).boxed();
        match self.scoring[index / self.n] && !index.is_multiple_of(self.n) {
            true => self.held.push((index, events)),
            false => self.running.push(events),
        }
    }

    /// No event will follow from the answers so far. Answers that are held follow a first one that runs.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// The next event. `None` if there is none from the answers so far. Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<Indexed> {
        let (index, event) = self.running.next().await?;
        let reports_more = matches!(event, Ok(Event::Admitted { .. } | Event::Prompt(_)));
        if index.is_multiple_of(self.n) && !reports_more && self.scoring[index / self.n] {
            let prompt = index / self.n;
            self.scoring[prompt] = false;
            for (_, events) in self.held.extract_if(.., |(held, _)| *held / self.n == prompt) {
                self.running.push(events);
            }
        }
        Some((index, event))
    }

    /// Drops all answers.
    pub fn clear(&mut self) {
        self.running.clear();
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream::iter;
    use kvist_engine::serving::{Done, FinishReason, Token};

    fn token() -> Event {
        Event::Token(Token { id: 7, text: "a".into(), logprob: None })
    }

    fn done() -> Event {
        Event::Done(Done { finish: FinishReason::Length, text: String::new(), usage: Default::default() })
    }

    /// Merges answers whose events are all ready, and returns them by kind, in order.
    async fn merged(scored: bool, answers: Vec<Vec<Event>>) -> Vec<(usize, char)> {
        let n = 2;
        let mut merged = MergedEvents::new(answers.len() / n, n, scored);
        for (index, events) in answers.into_iter().enumerate() {
            merged.push(index, iter(events.into_iter().map(Ok)).boxed());
        }
        let mut order = Vec::new();
        while let Some((index, event)) = merged.next().await {
            order.push((
                index,
                match event.unwrap() {
                    Event::Prompt(_) => 'p',
                    Event::Token(_) => 't',
                    _ => 'd',
                },
            ));
        }
        assert!(merged.is_empty() && merged.held.is_empty());
        order
    }

    /// Regression: where a client read slowly, tokens of the other answers came before the rest of the prompt's scores, which
    /// were then written as null.
    #[tokio::test]
    async fn other_answers_wait_for_the_scores_of_their_prompt() {
        let scores = |n| std::iter::repeat_with(|| Event::Prompt(Vec::new())).take(n);
        let answers = || {
            vec![
                scores(40).chain([token(), done()]).collect(),
                vec![token(), done()],
                // Nothing is generated.
                scores(3).chain([done()]).collect(),
                vec![done()],
            ]
        };
        let order = merged(true, answers()).await;
        assert_eq!(order.len(), 42 + 2 + 4 + 1);
        let at = |wanted: (usize, char)| order.iter().position(|event| *event == wanted).unwrap();
        let last_score = |index| order.iter().rposition(|event| *event == (index, 'p')).unwrap();
        assert!(at((1, 't')) > last_score(0), "{order:?}");
        assert!(at((3, 'd')) > last_score(2), "{order:?}");
        assert!(at((2, 'd')) < at((0, 't')), "a prompt does not wait for another one: {order:?}");
        // Without scores none waits.
        let order = merged(false, answers()).await;
        assert!(order.iter().position(|event| *event == (1, 't')).unwrap() < 40, "{order:?}");
    }
}
