"""What every configuration section shares: unknown keys are errors, values are checked on assignment."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections. Unknown keys are refused, so that a misspelt field never trains with its default; so are numbers
    that are not finite."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, validate_assignment=True, protected_namespaces=(), serialize_by_alias=True
    )
