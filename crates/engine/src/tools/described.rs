//! Tool support for models whose chat template does not know tools: the conversation says what a template
//! would.
//!
//! The functions are described in the system message, or in the first user message if the template takes no
//! system message, in the format of [`ToolFormat::Hermes`](super::ToolFormat::Hermes). Calls become text of
//! assistant messages and results become text of user messages, since such a template has no roles for them.
use super::text_of;
use serde_json::{Value, json};

/// Role of the message that describes the functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    System,
    User,
}

/// Adds to the messages what a template would say about tools.
pub(crate) fn describe(messages: &[Value], tools: &[Value], role: Role) -> Vec<Value> {
    let mut messages_out: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut answered = false;
    for message in messages {
        let is_result = message["role"] == "tool";
        match (is_result, messages_out.last_mut()) {
            // Results of several calls are joined into one message, because roles alternate in such templates.
            (true, Some(last)) if answered => append(last, &result(message)),
            (true, _) => messages_out.push(json!({"role": "user", "content": result(message)})),
            (false, _) => messages_out.push(called(message)),
        }
        answered = is_result;
    }
    if tools.is_empty() {
        return messages_out;
    }
    let description = description(tools);
    let name = if role == Role::System { "system" } else { "user" };
    match messages_out.iter_mut().find(|message| message["role"] == name) {
        Some(message) if role == Role::System => append(message, &description),
        Some(message) => prepend(message, &description),
        None => messages_out.insert(0, json!({"role": name, "content": description})),
    }
    messages_out
}

fn description(tools: &[Value]) -> String {
    let described: String = tools.iter().map(|tool| format!("{tool}\n")).collect();
    format!(
        "You can call functions. Each of these lines describes one, its parameters by a JSON schema:\n\
         <tools>\n{described}</tools>\n\
         To call a function, answer with its name and arguments as JSON, like this:\n\
         <tool_call>\n{{\"name\": \"the function's name\", \"arguments\": {{\"a parameter\": \"its value\"}}}}\n</tool_call>\n\
         Its result follows within <tool_response></tool_response>. Call a function only if you need it."
    )
}

/// Moves a message's calls into its text.
fn called(message: &Value) -> Value {
    let mut message = message.clone();
    let Some(fields) = message.as_object_mut() else { return message };
    let Some(Value::Array(calls)) = fields.remove("tool_calls") else { return message };
    let calls = calls.iter().map(|call| {
        let function = &call["function"];
        // In the API the arguments are a string that contains JSON.
        let arguments = match &function["arguments"] {
            Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| json!(text)),
            arguments => arguments.clone(),
        };
        let call = json!({"name": function["name"], "arguments": arguments});
        format!("<tool_call>\n{call}\n</tool_call>")
    });
    let calls = calls.collect::<Vec<_>>().join("\n");
    append(&mut message, &calls);
    message
}

fn result(message: &Value) -> String {
    format!("<tool_response>\n{}\n</tool_response>", text_of(&message["content"]))
}

/// Appends to a message's text. Content in parts becomes one text.
fn append(message: &mut Value, more: &str) {
    let text = text_of(&message["content"]);
    let between = if text.is_empty() { "" } else { "\n\n" };
    message["content"] = format!("{text}{between}{more}").into();
}

fn prepend(message: &mut Value, before: &str) {
    message["content"] = format!("{before}\n\n{}", text_of(&message["content"])).into();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    #[test]
    fn functions_are_described_once_and_where_they_may() {
        let tools = [json!({"type": "function", "function": {"name": "now"}})];
        let described = r#"{"type":"function","function":{"name":"now"}}"#;
        for (messages, role, at, begins, ends) in [
            (vec![said("user", "Hi")], Role::System, 0, "You can call", "if you need it."),
            (
                vec![said("system", "Be brief."), said("user", "Hi")],
                Role::System,
                0,
                "Be brief.\n\nYou can",
                "need it.",
            ),
            (vec![said("user", "Hi"), said("assistant", "Yes?")], Role::User, 0, "You can call", "\n\nHi"),
            (vec![said("system", "S"), said("user", "Hi")], Role::User, 1, "You can call", "\n\nHi"),
        ] {
            let messages_out = describe(&messages, &tools, role);
            let content = messages_out[at]["content"].as_str().unwrap();
            assert!(content.starts_with(begins) && content.ends_with(ends), "{content}");
            let all: String = messages_out.iter().filter_map(|message| message["content"].as_str()).collect();
            assert_eq!(all.matches(described).count(), 1, "{messages_out:?}");
            assert!(messages_out.len() >= messages.len());
            // Without tools nothing is added.
            assert_eq!(describe(&messages, &[], role), messages);
        }
    }

    #[test]
    fn calls_and_results_are_texts() {
        let messages = [
            said("user", "Two cities."),
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "function": {"name": "weather", "arguments": "{\"in\": \"Rome\"}"}},
                {"id": "2", "function": {"name": "weather", "arguments": "not JSON"}},
            ]}),
            json!({"role": "tool", "tool_call_id": "1", "content": "sun"}),
            json!({"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "rain"}]}),
            said("assistant", "Sun and rain."),
        ];
        let messages_out = describe(&messages, &[], Role::System);
        let expected = [
            said("user", "Two cities."),
            said(
                "assistant",
                "<tool_call>\n{\"name\":\"weather\",\"arguments\":{\"in\":\"Rome\"}}\n</tool_call>\n\
                 <tool_call>\n{\"name\":\"weather\",\"arguments\":\"not JSON\"}\n</tool_call>",
            ),
            said("user", "<tool_response>\nsun\n</tool_response>\n\n<tool_response>\nrain\n</tool_response>"),
            said("assistant", "Sun and rain."),
        ];
        assert_eq!(messages_out, expected);
    }
}
