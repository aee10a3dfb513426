//! Parses `tools` and `tool_choice` of a request.
use crate::grammar::{InvalidParameter, Schema};
use serde_json::{Map, Value, json};

/// OpenAI's limit.
const MAX_TOOLS: usize = 128;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    pub(super) parameters: Schema,
}

impl Tool {
    /// Schema of the function's arguments.
    pub(super) fn schema(&self) -> &Value {
        self.parameters.value()
    }
}

/// Which tools the model may or must call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// No calls; the tools are not shown to the model.
    None,
    /// The model decides.
    Auto,
    /// At least one call.
    Required,
    /// A call of this function.
    Named(String),
}

/// Parses `tools`. Unknown fields of a tool are left to the chat template.
pub fn tools_from_json(tools: &[Value]) -> Result<Vec<Tool>, InvalidParameter> {
    if tools.len() > MAX_TOOLS {
        return Err(InvalidParameter::new(
            "tools",
            format!("has {} entries; at most {MAX_TOOLS} are allowed", tools.len()),
        ));
    }
    let mut out: Vec<Tool> = Vec::with_capacity(tools.len());
    for (at, tool) in tools.iter().enumerate() {
        let bad =
            |field: &str, problem: String| InvalidParameter::new(&format!("tools[{at}]{field}"), problem);
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => {}
            Some(other) => return Err(bad(".type", format!("is `{other}`; expected `function`"))),
            None => return Err(bad(".type", "is missing; expected `function`".into())),
        }
        let function = tool.get("function").and_then(Value::as_object);
        let function = function.ok_or_else(|| bad(".function", "is not an object".into()))?;
        let name = function.get("name").and_then(Value::as_str);
        let name = name.ok_or_else(|| bad(".function.name", "is not a string".into()))?;
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > 64 || !name.chars().all(allowed) {
            let what = "must have 1 to 64 letters, digits, underscores, dashes or dots".into();
            return Err(bad(".function.name", what));
        }
        if out.iter().any(|other| other.name == name) {
            return Err(bad(".function.name", format!("is `{name}`, the name of another tool")));
        }
        let place = format!("tools[{at}].function.parameters");
        let parameters = match function.get("parameters") {
            None | Some(Value::Null) => {
                json!({"type": "object", "properties": {}, "additionalProperties": false})
            }
            Some(schema @ Value::Object(map)) => match map.get("type") {
                // A schema without `type` means an object here; otherwise the call could not be parsed.
                None => {
                    let mut map: Map<String, Value> = map.clone();
                    map.insert("type".into(), "object".into());
                    Value::Object(map)
                }
                Some(kind) if kind == "object" => schema.clone(),
                Some(_) => {
                    return Err(InvalidParameter::new(&format!("{place}.type"), "must be `object`".into()));
                }
            },
            Some(_) => return Err(InvalidParameter::new(&place, "is not an object".into())),
        };
        out.push(Tool { name: name.into(), parameters: Schema::new(&place, parameters) });
    }
    Ok(out)
}

impl ToolChoice {
    /// Parses `tool_choice`. The default is `auto` if there are tools.
    pub fn from_json(choice: Option<&Value>, tools: &[Tool]) -> Result<Self, InvalidParameter> {
        let bad = |problem: String| InvalidParameter::new("tool_choice", problem);
        let choice = match choice {
            None | Some(Value::Null) if tools.is_empty() => ToolChoice::None,
            None | Some(Value::Null) => ToolChoice::Auto,
            Some(Value::String(word)) => match word.as_str() {
                "none" => ToolChoice::None,
                "auto" => ToolChoice::Auto,
                "required" => ToolChoice::Required,
                _ => {
                    return Err(bad(format!(
                        "is `{word}`; expected none, auto, required or a named function"
                    )));
                }
            },
            Some(choice) => {
                let function = choice.get("type").is_some_and(|kind| kind == "function");
                let name = choice.get("function").and_then(|f| f.get("name")).and_then(Value::as_str);
                let (true, Some(name)) = (function, name) else {
                    let what =
                        r#"must be none, auto, required or {"type": "function", "function": {"name": …}}"#;
                    return Err(bad(what.into()));
                };
                if !tools.iter().any(|tool| tool.name == name) {
                    return Err(bad(format!("names `{name}`, which is not among the tools")));
                }
                ToolChoice::Named(name.into())
            }
        };
        if tools.is_empty() && choice != ToolChoice::None {
            return Err(bad("is given, but there are no tools".into()));
        }
        Ok(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"properties": {"a": {"type": "integer"}}}}})
    }

    #[test]
    fn bad_tools_are_refused_by_place() {
        for (tools, place) in [
            (vec![json!({"function": {"name": "f"}})], "`tools[0].type` is missing"),
            (vec![json!({"type": "code_interpreter"})], "`tools[0].type` is `code_interpreter`"),
            (vec![json!({"type": "function"})], "`tools[0].function` is not an object"),
            (vec![tool("f"), tool("f")], "`tools[1].function.name` is `f`"),
            (vec![tool("a\"b")], "`tools[0].function.name`"),
            (vec![tool("")], "`tools[0].function.name`"),
            (
                vec![json!({"type": "function", "function": {"name": "f", "parameters": []}})],
                "`tools[0].function.parameters`",
            ),
            (
                vec![
                    json!({"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}),
                ],
                "`tools[0].function.parameters.type`",
            ),
            ((0..129).map(|n| tool(&format!("f{n}"))).collect(), "`tools` has 129"),
        ] {
            let error = tools_from_json(&tools).unwrap_err().to_string();
            assert!(error.contains(place), "{tools:?}: {error}");
        }
    }

    #[test]
    fn choices() {
        let tools = tools_from_json(&[tool("f"), tool("g")]).unwrap();
        let named = json!({"type": "function", "function": {"name": "g"}});
        for (choice, expected) in [
            (None, ToolChoice::Auto),
            (Some(json!(null)), ToolChoice::Auto),
            (Some(json!("none")), ToolChoice::None),
            (Some(json!("required")), ToolChoice::Required),
            (Some(named.clone()), ToolChoice::Named("g".into())),
        ] {
            assert_eq!(ToolChoice::from_json(choice.as_ref(), &tools), Ok(expected), "{choice:?}");
        }
        assert_eq!(ToolChoice::from_json(None, &[]), Ok(ToolChoice::None));
        for choice in
            [json!("any"), json!(1), json!({"type": "function"}), json!({"function": {"name": "f"}})]
        {
            assert!(ToolChoice::from_json(Some(&choice), &tools).is_err(), "{choice}");
        }
        let other = json!({"type": "function", "function": {"name": "h"}});
        assert!(ToolChoice::from_json(Some(&other), &tools).unwrap_err().to_string().contains("`h`"));
        assert!(ToolChoice::from_json(Some(&json!("required")), &[]).is_err());
    }
}
